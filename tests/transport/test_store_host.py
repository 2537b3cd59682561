"""Processes that die where neither collective nor store tells which it was: before the first use; rank 0 and its store.

Rank 0 serves the store, as `init_process_group` with ``tcp://`` or ``env://`` has it. Whatever the survivors call ends
in the same `RankMissing`, which names the rank, within the call's deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ddpstats.testing import run_ranks
from tests.programs import Program, environ_of, reserved_port
from tests.transport.store_host_rank import GUARDED, TIMEOUT_SEC, forked, left_alone, stopped

LIMIT_SEC = 150.0
SLACK_SEC = 5.0


def told_by_survivors(phase: str, victim: int, world_size: int = 3, launched: bool = False) -> list[dict[str, Any]]:
    """What each survivor prints; ``launched``: the ranks are started with the variables that torchrun sets."""
    scratch = tempfile.mkdtemp()
    stack = contextlib.ExitStack()
    port = stack.enter_context(reserved_port())
    processes = []
    for rank in range(world_size):
        environ = environ_of(GLOO_SOCKET_IFNAME="lo", TMPDIR=scratch, TORCH_CPP_LOG_LEVEL="FATAL")
        if launched:
            environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
        command = ["-m", "tests.transport.store_host_rank", *map(str, (rank, world_size, port)), phase, str(victim)]
        # the environment that /proc shows for a launched rank is its own
        processes.append(Program(command, environ, fresh=launched))
        stack.push(processes[-1])
    with stack:
        ended = [process.finish(LIMIT_SEC) for process in processes]
    assert [done.returncode for done in ended] == [-9 if rank == victim else 0 for rank in range(world_size)], ended
    os.rmdir(scratch)  # it is empty: what ranks of a host tell each other without the store goes with the last of them
    return [json.loads(done.stdout) for rank, done in enumerate(ended) if rank != victim]


def check(survivors: list[dict[str, Any]], victim: int, limit_sec: float) -> None:
    for name in survivors[0]["told"]:
        told = [one[kind][name] for one in survivors for kind in ("told", "again")]
        assert {one["raised"] for one in told} == {"RankMissing"}, (name, told)
        assert {tuple(one["missing"]) for one in told} == {(victim,)}, (name, told)
        assert len({one["text"] for one in told}) == 1, (name, told)
        how = "is gone, and the store with it" if victim == 0 else "the process is gone"
        assert f"rank {victim}: {how}" in told[0]["text"]
        assert max(one["after_sec"] for one in told) < limit_sec, (name, told)
    assert [one["left"] for one in survivors] == [[]] * len(survivors)


@pytest.mark.parametrize("phase", ["before", "between", "during"])
def test_the_host_of_the_store_dies(phase: str) -> None:
    check(told_by_survivors(phase, 0), 0, TIMEOUT_SEC + SLACK_SEC)


@pytest.mark.parametrize("phase", ["before", "between"])
def test_another_rank_dies_before_it_used_anything(phase: str) -> None:
    """Known at once, by what its launcher left in its environment."""
    check(told_by_survivors(phase, 1, launched=True), 1, TIMEOUT_SEC / 2)


@pytest.mark.parametrize("mode", ["strict", "step"])
def test_the_host_of_the_store_dies_under_a_guard(mode: str) -> None:
    check(told_by_survivors(mode, 0), 0, TIMEOUT_SEC + SLACK_SEC)


# -- on ranks that are forked: a start costs little -------------------------------------------------------------------


def told_by_forked(phase: str, name: str, directory: str = "") -> list[dict[str, Any]]:
    """What ranks 1 and 2 of three say."""
    with reserved_port() as port:
        outcomes = run_ranks(forked, 3, port, phase, name, directory, timeout_sec=60.0)
    assert outcomes[0].exit_code == -9
    assert [outcome.error for outcome in outcomes[1:]] == [None, None], outcomes
    return [outcome.value for outcome in outcomes[1:]]


def test_a_rank_that_serves_the_store_no_more_does_not_name_itself() -> None:
    with reserved_port() as port:
        outcomes = run_ranks(left_alone, 2, port, timeout_sec=60.0)
    told = outcomes[0].value
    assert told["missing"] == [1], told
    assert "rank 1: the process is gone" in told["text"]


def test_a_rank_that_was_stopped_and_serves_the_store_is_told_what_the_others_were() -> None:
    with reserved_port() as port:
        told = [outcome.value for outcome in run_ranks(stopped, 3, port, timeout_sec=60.0)]
    assert len({(tuple(one["missing"]), one["text"]) for one in told}) == 1, told
    assert told[0]["missing"] == [0]
    assert "rank 0: serves the store, which does not answer" in told[0]["text"]


@pytest.mark.parametrize("phase", ["before", "between"])
def test_the_host_of_the_store_dies_and_a_step_is_judged(phase: str) -> None:
    check(told_by_forked(phase, ""), 0, TIMEOUT_SEC + SLACK_SEC)


@pytest.mark.parametrize("name", ["NaNCapture.check", "Sentinel.step", "gather_trees"])
def test_the_host_of_the_store_dies_while_a_step_is_judged(name: str) -> None:
    check(told_by_forked("during", name), 0, TIMEOUT_SEC + SLACK_SEC)


@pytest.mark.parametrize("where", ["new_directory", "write_part", "write_manifest"])
def test_the_host_of_the_store_dies_while_a_bundle_is_written(where: str, tmp_path: Path) -> None:
    check(told_by_forked("bundle", where, str(tmp_path)), 0, TIMEOUT_SEC + SLACK_SEC)
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("*/manifest.json")]
    assert not any(manifest["complete"] for manifest in manifests)


@pytest.mark.parametrize("mode", ["strict", "step"])
@pytest.mark.parametrize("name", sorted(GUARDED))
def test_the_host_of_the_store_dies_and_a_guarded_call_is_made(name: str, mode: str) -> None:
    """Messages are compared by the two that they concern, so texts differ; all name the rank."""
    survivors = told_by_forked(mode, name)
    for one in survivors:
        for told in (one["told"][name], one["again"][name]):
            assert told["raised"] == "RankMissing", told
            if name != "recv from anybody":  # any other rank might still send
                assert told["missing"] == [0], told
                assert "rank 0: is gone, and the store with it" in told["text"], told
            assert told["after_sec"] < TIMEOUT_SEC + SLACK_SEC, told
        assert one["left"] == []
    if name not in ("send", "recv", "recv from anybody", "irecv", "exchange", "between survivors"):
        assert survivors[0]["told"][name]["text"] == survivors[1]["told"][name]["text"]
