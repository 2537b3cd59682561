"""Ranks come to one verdict: with threads, where one rank has labels, and where the store is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpstats
from ddpstats._ranks.store import wait_for
from ddpstats.guard import collective_guard, verdicts
from ddpstats.guard.failure_agreement import FailureAgreement
from ddpstats.guard.group import GuardMode
from ddpstats.guard.verdicts import ends_by_timeout, is_broken
from ddpstats.testing import RankPool, run_ranks
from tests.guard.runs import serve_by_rank_0
from tests.guard.tiers import tiers
from tests.programs import reserved_port
from tests.ranks.store_host_runs import pid_of, serve_anew

# -- what runs on the ranks -------------------------------------------------------------------------------------------


Raised = tuple[str, tuple[int, ...], str]
"""The name of an error, the ranks that it calls missing, and its text."""


def two_threads(steps: int) -> str:
    """Reduce in two threads, each in its own group; rank 0 alone has labels."""
    groups = [dist.new_group(), dist.new_group()]
    problems: list[str] = []

    def work(number: int) -> None:
        try:
            for _ in range(steps):
                with ddpstats.label("loss") if dist.get_rank() == 0 else nullcontext():
                    dist.all_reduce(torch.ones(1), group=groups[number])
        except ddpstats.DdpstatsError as error:
            problems.append(f"{type(error).__name__}: {error}")

    try:
        with collective_guard("step", check_every=1, timeout_sec=20) as guard:
            threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            guard.step()
    except ddpstats.DdpstatsError as error:
        problems.append(f"{type(error).__name__}: {error}")
    return "; ".join(problems)


def label_on_one_rank(steps: int, name: str) -> tuple[int, int]:
    """Return the verdicts that ranks came to, and the keys that the last ten steps added to the store.

    ``name``: the label, in which ``{}`` is the step.
    """
    store = dist.distributed_c10d._get_default_store()
    with collective_guard("step", timeout_sec=20) as guard:
        for step in range(steps):
            if step == steps - 10:
                wait_for(lambda: bool(_agreement_of(guard)._kept_position), 20.0)  # its watchdog writes that once
                dist.barrier()
                before = store.num_keys()
            with ddpstats.label(name.format(step)) if dist.get_rank() == 0 else nullcontext():
                dist.all_reduce(torch.ones(1))
            guard.step()
        dist.barrier()
        added = store.num_keys() - before
        dist.barrier()  # a rank that leaves writes keys, too
        return _agreement_of(guard).verdicts, added


def helper_with_names() -> str:
    """Return the verdict on ranks that name one call differently, behind one that rank 1 gave no name."""

    def reduce(name: str | None) -> None:
        with nullcontext() if name is None else ddpstats.label(name):
            dist.all_reduce(torch.ones(1))

    is_first = dist.get_rank() == 0
    try:
        with collective_guard("step", timeout_sec=20) as guard:
            reduce("total" if is_first else None)
            guard.step()
            reduce("l1" if is_first else "snr")
            guard.step()
    except ddpstats.CollectiveMismatch as error:
        return str(error)
    return "nothing"


def _agreement_of(guard: collective_guard) -> FailureAgreement:
    session = guard._watching.session
    assert session is not None
    assert session.agreement is not None
    return session.agreement


def killed_before_rank_0_ends(mode: GuardMode) -> Raised:
    """Rank 2 is killed. Rank 0 finds that and ends, and its store with it. Rank 1 comes later."""
    serve_by_rank_0()
    rank = dist.get_rank()
    try:
        with collective_guard(mode, timeout_sec=30):
            dist.all_reduce(torch.ones(1))
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(6.0 if rank == 1 else 0.5)
            dist.all_reduce(torch.ones(1))
    except ddpstats.RankMissing as error:
        if rank == 0:
            os._exit(3)
        return type(error).__name__, error.missing_ranks, str(error)
    return "nothing", (), ""


def host_is_killed(mode: GuardMode) -> tuple[str, str]:
    """Rank 0 is killed, and its store with it. Return the error's text, and all that Python prints of it."""
    serve_by_rank_0()
    try:
        with collective_guard(mode, timeout_sec=30):
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(2))
    except ddpstats.RankMissing as error:
        return str(error), "".join(traceback.format_exception(error))
    return "nothing", ""


def host_is_stopped(port: int) -> tuple[Raised, float] | None:
    """Rank 0, which serves the store, is stopped before it enters the guard in which rank 1 waits.

    Return what rank 1 raises, and after how long.
    """
    rank = serve_anew(port)
    host, store = pid_of(0), dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["has raised"])
        return None
    started = time.monotonic()
    raised: Raised = "nothing", (), ""
    try:
        with collective_guard("strict", timeout_sec=2):
            work = dist.all_reduce(torch.ones(1), async_op=True)
            assert work is not None
            os.kill(host, signal.SIGSTOP)
            work.wait()
    except ddpstats.RankMissing as error:
        raised = type(error).__name__, error.missing_ranks, str(error)
    finally:
        os.kill(host, signal.SIGCONT)
    took_sec = time.monotonic() - started
    store.set("has raised", "")
    return raised, took_sec


def aborted(mode: GuardMode, what: str, odd: int) -> Raised:
    """Do what makes gloo end one of the two processes. Rank 0 serves the store; rank ``odd`` differs."""
    serve_by_rank_0()
    rank = dist.get_rank()
    try:
        with collective_guard(mode, timeout_sec=15):
            dist.all_reduce(torch.ones(1))
            if what == "splits":
                sizes = [3 if rank == odd != peer else 2 for peer in range(2)]
                dist.all_to_all_single(torch.empty(4), torch.ones(sum(sizes)), [2, 2], sizes)
            elif what == "refused":
                dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 3] if rank == odd else [2, 2], [2, 2])
            else:
                _train(stray=rank == odd)
    except (ddpstats.DdpstatsError, RuntimeError) as error:
        return type(error).__name__, getattr(error, "missing_ranks", ()), str(error)
    return "nothing", (), ""


def _train(stray: bool) -> None:
    model: Any = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        if stray:
            dist.all_reduce(torch.ones(3))


def one_step_less(is_meant: bool, patience_sec: float) -> tuple[Raised, float]:
    """Rank 1 leaves without the last collective of rank 0, and how long that takes.

    Rank 0 then waits where the guard sees nothing, as in DDP, until rank 1 has left; or, where that ``is_meant``, for
    the collective, with a timeout that it catches.
    """
    store = dist.distributed_c10d._get_default_store()
    started = time.monotonic()
    raised: Raised = "nothing", (), ""
    try:
        with mock.patch.object(verdicts, "_PASSED_SEC", patience_sec), collective_guard("step"):
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 0:
                work: Any = dist.all_reduce(torch.ones(1), async_op=True)
                if is_meant:
                    with suppress(RuntimeError):
                        work.wait(timedelta(seconds=1))
                else:
                    store.wait(["has left"], timedelta(seconds=30))
    except ddpstats.DdpstatsError as error:
        raised = type(error).__name__, getattr(error, "missing_ranks", ()), str(error)
    took_sec = time.monotonic() - started
    store.set("has left", "")
    return raised, took_sec


# -- tests ------------------------------------------------------------------------------------------------------------


def test_threads_of_two_groups_do_not_take_one_verdict_for_two() -> None:
    assert run_ranks(two_threads, 2, 40, timeout_sec=60).values() == ["", ""]


@pytest.mark.parametrize(("name", "most"), [("loss", 1), ("loss of step {}", 8)])
def test_place_whose_label_one_rank_lacks_is_not_compared_for_ever(two_ranks: RankPool, name: str, most: int) -> None:
    for count, added in two_ranks.run(label_on_one_rank, 20, name).values():
        assert count <= most
        assert added == 0


def test_helper_that_one_rank_once_called_without_a_name_is_compared_on(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(helper_with_names).values()
    assert first == second
    assert "(number 2 of this group)" in first
    assert "What differs: the label" in first


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "step"])
def test_rank_that_comes_when_the_store_is_gone_raises_the_verdict_of_the_others(mode: GuardMode) -> None:
    _, late, _ = run_ranks(killed_before_rank_0_ends, 3, mode, timeout_sec=60)
    assert late.value is not None, late
    assert late.value[:2] == ("RankMissing", (2,)), late.value


@pytest.mark.parametrize("mode", tiers(["strict"], ["step"]))
def test_rank_that_loses_the_store_with_rank_0_says_what_it_called_itself(mode: GuardMode) -> None:
    _, *survivors = run_ranks(host_is_killed, 3, mode, timeout_sec=60)
    for rank, survivor in enumerate(survivors, 1):
        assert survivor.value is not None, survivor
        text, shown = survivor.value
        assert f"  rank {rank}: all_reduce(float32[2], sum)\n      at " in text
        whose = "the output of all ranks" if "which rank is missing cannot be determined" in text else "their output"
        assert f"\nLook at {whose} and at the network first.\n" in text
        assert "in find" not in shown
        assert "During handling" not in shown


def test_wait_ends_where_the_rank_that_serves_the_store_is_stopped_before_it_joins() -> None:
    with reserved_port() as port:
        result = run_ranks(host_is_stopped, 2, port, timeout_sec=60)[1].value
    assert result is not None
    (name, missing, text), took_sec = result
    assert (name, missing) == ("RankMissing", (0,))
    assert "rank 0: serves the store, which does not answer" in text
    assert took_sec < 15


@pytest.mark.parametrize(
    ("mode", "what", "odd"),
    tiers(
        [("step", "splits", 1)],
        [("step", "splits", 0), *((mode, "stray", odd) for mode in ("step", "strict") for odd in (0, 1))],
    ),
)
def test_survivor_names_both_calls_where_gloo_aborts_the_other_rank(mode: GuardMode, what: str, odd: int) -> None:
    outcomes = run_ranks(aborted, 2, mode, what, odd, timeout_sec=60)
    ends = [outcome.value for outcome in outcomes if outcome.value is not None]
    assert ends, outcomes
    for name, _, text in ends:
        assert name == "CollectiveMismatch", text
        assert "  rank 0: " in text
        assert "  rank 1: " in text
        assert "test_verdicts.py" in text or "DistributedDataParallel" in text


def test_rank_whose_arguments_gloo_refuses_names_both_calls_too() -> None:
    """Gloo refuses them before it asks the other rank, which then waits."""
    for name, _, text in run_ranks(aborted, 2, "step", "refused", 1, timeout_sec=60).values():
        assert name == "CollectiveMismatch", text
        assert "expects [1 x float32, 3 x float32]" in text


def test_rank_that_ends_while_another_waits_in_a_later_collective_is_named_in_seconds() -> None:
    """The other one waits as in DDP, and posts nothing that the last comparison could wait for."""
    for (name, missing, text), took_sec in run_ranks(one_step_less, 2, False, 0.5, timeout_sec=60).values():
        assert (name, missing) == ("RankMissing", (1,)), text
        assert "rank 1: left the guard" in text
        assert took_sec < 20


@pytest.mark.slow
def test_rank_that_ends_while_another_waits_with_a_timeout_is_not_accused() -> None:
    for (name, _, text), _ in run_ranks(one_step_less, 2, True, 5.0, timeout_sec=60).values():
        assert name == "nothing", text


@pytest.mark.parametrize(
    "text",
    [
        "Connection closed by peer [127.0.0.1]:39487",
        "Timed out waiting 4000ms for recv operation to complete",
        "Application timeout caused pair closure",  # gloo, of what is issued after that
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)",
    ],
)
def test_what_a_backend_says_of_a_lost_rank_is_known(text: str) -> None:
    error = RuntimeError(text)
    try:
        exec("raise error", {"__name__": "torch.distributed", "error": error})
    except RuntimeError:
        assert is_broken(error)
    assert not is_broken(RuntimeError(text))  # the program has made it


ABORTED = "NCCL communicator was aborted on rank 0."


@pytest.mark.parametrize(
    ("text", "is_timeout"),
    [
        ("Rank 0 failed to pass monitoredBarrier in 1000 ms", True),
        (ABORTED, False),
        (f"{ABORTED} Original reason for failure was: ncclRemoteError: A call failed", False),
        (f"{ABORTED} Original reason for failure was: Watchdog caught collective operation timeout: WorkNCCL(", True),
        (f"{ABORTED} Original reason for failure was: NCCL error: ncclUnhandledCudaError", False),
        ("shape mismatch", False),
    ],
)
def test_whether_a_collective_that_fails_at_once_has_timed_out(text: str, is_timeout: bool) -> None:
    """The program gets torch's error after a timeout; where a rank is lost, the guard names it."""
    assert ends_by_timeout(text) == is_timeout
