"""Guards one after another, and process groups under one guard, agree also where a rank was idle under the first."""

from __future__ import annotations

import io
import itertools
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddpstats import cli
from ddpstats._observe.groups import GroupView, view_of
from ddpstats.guard import collective_guard, notes_shm
from ddpstats.guard.group import Group, GuardMode, Settings
from ddpstats.guard.notes import Note
from ddpstats.testing import run_ranks
from tests.guard.tiers import tiers

# -- what runs on the ranks -------------------------------------------------------------------------------------------


def gone_on(before: str, after: str, mode: GuardMode, directory: str) -> float:
    """Return the sum of an all_reduce in which each rank gives 1, after one rank was idle."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    records = f"{directory}/records"
    total = torch.ones(1)
    with collective_guard(mode, record_dir=records, timeout_sec=10):
        dist.destroy_process_group()
        _join(f"{directory}/first", rank, world_size)
        group = dist.new_group(list(np.arange(2)))  # of numpy's integers, which torch takes
        if before == "subgroup" and rank < 2:
            dist.all_reduce(torch.ones(1), group=group)
        elif before == "message" and rank < 2:
            dist.recv(torch.empty(1), 0) if rank else dist.send(torch.ones(1), 1)
        if after == "another life":
            dist.destroy_process_group()
            _join(f"{directory}/second", rank, world_size)
            dist.all_reduce(total)
            dist.barrier()
    if after == "another guard":
        with collective_guard(mode, record_dir=records, timeout_sec=10):
            dist.all_reduce(total)
            dist.barrier()
    return float(total)


def in_own_group(mode: GuardMode) -> bool:
    """Return whether a rank can wait for a collective of a group that no other rank is in."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    with collective_guard(mode, timeout_sec=10):
        work = dist.all_reduce(torch.ones(1), group=groups[dist.get_rank()], async_op=True)
        assert work is not None
        return bool(work.wait())


def of_one_name(has_same_members: bool) -> bool:
    """Return whether two ranks meet in a group of one name, whose members may be others on rank 1."""
    with collective_guard("strict", timeout_sec=10) as guard:
        dist.barrier()
        session = guard._watching.session
        assert session is not None
        ranks = (0, 1) if has_same_members or dist.get_rank() == 0 else (1, 0)
        exchange = session.add(replace(view_of(dist.group.WORLD), name="pair", ranks=ranks)).exchange
        assert exchange is not None
        exchange.post(1, Note(7))
        dist.barrier()
        return exchange.look(1) is not None


def _join(file: str, rank: int, world_size: int) -> None:
    """Returns when all have joined: gloo fails a rank that still connects to one that leaves already."""
    dist.init_process_group("gloo", init_method=Path(file).as_uri(), rank=rank, world_size=world_size)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"joined by {rank}", "")
    store.wait([f"joined by {index}" for index in range(world_size)])


# -- tests ------------------------------------------------------------------------------------------------------------


CASES = tiers(
    [("subgroup", "another guard", "step"), ("message", "another life", "strict")],
    [
        *(("nothing", "another guard", "strict"), ("nothing", "another life", "step")),
        *(("subgroup", "another life", "record"), ("message", "another guard", "record")),
    ],
)


@pytest.mark.parametrize(("before", "after", "mode"), CASES)
def test_rank_that_was_idle_goes_on_with_the_others(
    before: str, after: str, mode: GuardMode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = run_ranks(gone_on, 3, before, after, mode, str(tmp_path), timeout_sec=60)
    assert outcomes.values() == [3.0] * 3
    assert cli.main(["report", str(tmp_path / "records")]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("has_same_members", [True, False])
def test_groups_of_one_name_and_other_members_are_not_compared(has_same_members: bool) -> None:
    assert run_ranks(of_one_name, 2, has_same_members, timeout_sec=60).values() == [has_same_members] * 2


def test_notes_are_those_that_were_asked_for_while_another_thread_posts() -> None:
    """The attribute is read here as if the other thread posted right after the first look at it."""
    fifth, sixth = Note(5, 0, 1), Note(6, 7, 1)
    posts = [(5, [fifth, fifth]), *itertools.repeat((6, [sixth, sixth]), 9)]
    with io.FileIO(os.memfd_create("notes"), "r+") as file:
        file.truncate(2 * notes_shm._RANK_BYTES)
        shared, peer = notes_shm._SharedMemory(file, 0, 2), notes_shm._SharedMemory(file, 1, 2)
        shared.write(5, fifth)
        peer.write(5, fifth)
        with mock.patch.object(notes_shm._SharedMemory, "_posted", mock.PropertyMock(side_effect=posts), create=True):
            assert shared.read_all(5) == [fifth, fifth]


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ("default_pg", "the default group of 2 ranks"),
        ("mesh_tp", "group 'mesh_tp' of ranks 0, 3"),
        ("undefined", "group '7' of ranks 0, 3"),
    ],
)
def test_group_is_named_by_its_description_and_its_ranks(description: str, words: str) -> None:
    """The internal name is not shown: its numbers begin again with each life of the default group."""
    view = GroupView("7", description, (0, 3), 0, False)
    assert Group("7 of session 5", view, None, Settings("step", False, True, 64, 300.0, False, None)).words == words


@pytest.mark.parametrize("mode", ["strict", "step"])
def test_asynchronous_collective_of_a_group_of_one_rank_is_waited_for(mode: GuardMode) -> None:
    assert run_ranks(in_own_group, 2, mode).values() == [True, True]
