"""A timeout that the program gave to a group or a call ends the wait, with torch's own error, also under a guard."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpstats import DdpstatsError
from ddpstats.guard import collective_guard
from ddpstats.guard.group import GuardMode
from ddpstats.testing import run_ranks
from tests.guard.runs import without_shared_memory
from tests.guard.tiers import tiers

# -- what runs on the ranks -------------------------------------------------------------------------------------------


LIMIT_SEC = 2.0
Ending = tuple[str, float, str]
"""The type of what a rank has caught, after how many seconds, and what the guard raised when it was left."""


def _wait_with_limit(group: Any) -> None:
    work: Any = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait(timedelta(seconds=LIMIT_SEC))


def _wait(group: Any) -> None:
    work: Any = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait()


def _wait_for_limited_call(group: Any) -> None:
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=LIMIT_SEC)
    work = group.allreduce([torch.ones(1)], options)
    options.timeout = timedelta(minutes=1)  # of no consequence: torch has copied them
    work.wait()


CALLS: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "barrier": lambda group: dist.barrier(group),
    "async": _wait,
    "all_gather": lambda group: dist.all_gather([torch.ones(1)] * group.size(), torch.ones(1), group=group),
    "wait(timeout)": _wait_with_limit,
    "options with timeout": _wait_for_limited_call,
    "monitored_barrier(timeout)": lambda group: dist.monitored_barrier(group, timedelta(seconds=LIMIT_SEC)),
}


def stays_away(
    mode: GuardMode | None, call: str, absent: int, limited_group: bool, guard_sec: float | None = None
) -> Ending:
    """The group's timeout is two seconds, or the call's own is. The rank ``absent`` makes no such call."""
    limit = timedelta(seconds=LIMIT_SEC) if limited_group else timedelta(minutes=1)
    group = dist.new_group(timeout=limit)
    ending: Ending = "nothing", 0.0, "nothing"
    store = dist.distributed_c10d._get_default_store()
    try:
        with _guard(mode, guard_sec):
            dist.all_reduce(torch.ones(1))
            started = time.monotonic()
            if dist.get_rank() != absent:
                try:
                    CALLS[call](group)
                except Exception as error:
                    ending = type(error).__name__, time.monotonic() - started, "nothing"
            store.set(f"tried {dist.get_rank()}", "")
            store.wait([f"tried {rank}" for rank in range(dist.get_world_size())], timedelta(seconds=30))
            dist.all_reduce(torch.ones(1))
    except DdpstatsError as error:
        return *ending[:2], f"{type(error).__name__}: {error}"
    return ending


def default_group_is_limited(mode: GuardMode | None, directory: str) -> Ending:
    """Rank 1 never comes to the second collective of a default group whose timeout is two seconds."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    limit = timedelta(seconds=LIMIT_SEC)
    meeting = (Path(directory) / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=limit)
    guard = _guard(mode)
    guard.__enter__()
    dist.all_reduce(torch.ones(1))
    started, ending = time.monotonic(), ("nothing", 0.0, "nothing")
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except Exception as error:
            ending = type(error).__name__, time.monotonic() - started, str(error) + "".join(_notes(error))
        Path(directory, "done").touch()
    while not Path(directory, "done").exists():
        time.sleep(0.05)
    if mode is not None:
        guard.abandon()
    return ending


def note_on_absence(mode: GuardMode, absent: int, without_memory: tuple[int, ...]) -> str:
    """Return the note on the timeout of a group of which these ranks share no memory with the others."""
    group, note = dist.new_group(timeout=timedelta(seconds=LIMIT_SEC)), ""
    store = dist.distributed_c10d._get_default_store()
    with without_shared_memory() if dist.get_rank() in without_memory else nullcontext(), _guard(mode):
        dist.all_reduce(torch.ones(1), group=group)
        if dist.get_rank() != absent:
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except RuntimeError as error:
                note = "".join(_notes(error))
        store.set(f"noted {dist.get_rank()}", "")
        store.wait([f"noted {rank}" for rank in range(dist.get_world_size())], timedelta(seconds=30))
    return note


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _guard(mode: GuardMode | None, timeout_sec: float | None = None) -> Any:
    return collective_guard(mode or "off", timeout_sec=timeout_sec)


# -- tests ------------------------------------------------------------------------------------------------------------


LATE_SEC = 1.5  # on a machine with other work; the promise is one second

CASES = tiers(
    [("strict", "all_reduce"), ("strict", "options with timeout"), ("step", "barrier")],
    [
        *(("step", "options with timeout"), ("strict", "all_gather"), ("step", "async"), ("strict", "barrier")),
        *(("strict", "wait(timeout)"), ("step", "wait(timeout)"), ("step", "all_reduce")),
        ("strict", "monitored_barrier(timeout)"),
    ],
)


@pytest.mark.parametrize(("mode", "call"), CASES)
def test_torchs_own_timeout_is_caught_in_time_and_the_program_goes_on(mode: GuardMode, call: str) -> None:
    limited_group = "timeout" not in call
    caught, absent = run_ranks(stays_away, 2, mode, call, 1, limited_group, timeout_sec=60).values()
    assert (caught[0], caught[2]) == ("RuntimeError", "nothing"), caught
    assert LIMIT_SEC - 0.5 < caught[1] < LIMIT_SEC + LATE_SEC
    assert absent == ("nothing", 0.0, "nothing")


@pytest.mark.parametrize("mode", tiers(["step"], ["strict"]))
def test_guards_own_limit_does_not_lengthen_that_of_the_group(mode: GuardMode) -> None:
    caught, _ = run_ranks(stays_away, 2, mode, "async", 1, True, guard_sec=12.0, timeout_sec=60).values()
    assert (caught[0], caught[2]) == ("RuntimeError", "nothing"), caught
    assert caught[1] < LIMIT_SEC + LATE_SEC


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "step"])
def test_all_ranks_that_wait_catch_torchs_own_timeout(mode: GuardMode) -> None:
    *waiting, absent = run_ranks(stays_away, 3, mode, "all_reduce", 2, True, timeout_sec=60).values()
    for caught in waiting:
        assert (caught[0], caught[2]) == ("RuntimeError", "nothing"), caught
        assert caught[1] < LIMIT_SEC + LATE_SEC
    assert absent == ("nothing", 0.0, "nothing")


@pytest.mark.parametrize("mode", tiers(["strict"], ["step"]))
def test_timeout_of_default_group_is_torchs_error_with_a_note_that_names_the_rank(
    mode: GuardMode, tmp_path: Path
) -> None:
    caught, _ = run_ranks(default_group_is_limited, 2, mode, str(tmp_path), timeout_sec=60).values()
    assert caught[0] == "RuntimeError", caught
    assert caught[1] < LIMIT_SEC + LATE_SEC
    assert "rank 1 did not come to collective number 2 of the default group" in caught[2]
    assert "test_timeouts.py" in caught[2]


WITHOUT_MEMORY = tiers([("step", (0, 1, 2))], [("step", (1,)), ("strict", (0, 1, 2)), ("strict", (1,))])


@pytest.mark.parametrize(("mode", "without_memory"), WITHOUT_MEMORY)
def test_note_names_no_rank_of_which_nothing_is_known(mode: GuardMode, without_memory: tuple[int, ...]) -> None:
    notes = run_ranks(note_on_absence, 3, mode, 2, without_memory, timeout_sec=60).values()
    assert any(notes)  # the rank that gives up first has one, at least
    for note in filter(None, notes):
        assert "did not come" in note or mode == "step", note
        assert "rank 2 did not come" in note or "not all ranks came" in note, note
