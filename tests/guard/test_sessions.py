"""Guards one after another, and process groups under one guard, agree also where a rank was idle under the first."""

from __future__ import annotations

import io
import itertools
import os
from pathlib import Path
from unittest import mock

import pytest

from ddpstats import cli
from ddpstats._observe.groups import GroupView
from ddpstats.guard import notes_shm
from ddpstats.guard.group import Group, GuardMode, Settings
from ddpstats.guard.notes import Note
from ddpstats.testing import run_ranks
from tests.guard import session_runs as runs

UNMARKED = [("subgroup", "another guard", "step"), ("message", "another life", "strict")]
CASES = itertools.product(
    ("subgroup", "message", "nothing"), ("another guard", "another life"), ("strict", "step", "record")
)


@pytest.mark.parametrize(
    ("before", "after", "mode"),
    [pytest.param(*case, marks=() if case in UNMARKED else pytest.mark.slow) for case in CASES],
)
def test_rank_that_was_idle_goes_on_with_the_others(
    before: str, after: str, mode: GuardMode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = run_ranks(runs.gone_on, 3, before, after, mode, str(tmp_path), timeout_sec=60)
    assert outcomes.values() == [3.0] * 3
    assert cli.main(["report", str(tmp_path / "records")]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("alike", [True, False])
def test_groups_of_one_name_and_other_members_are_not_compared(alike: bool) -> None:
    assert run_ranks(runs.of_one_name, 2, alike, timeout_sec=60).values() == [alike] * 2


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
    """Not by what it is called inside, where numbers begin again with each life of the default group."""
    view = GroupView("7", description, (0, 3), 0, False)
    assert Group("7 of session 5", view, None, Settings("step", False, True, 64, 300.0, False, None)).words == words
