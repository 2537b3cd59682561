"""A program that waits where no guard waits with it: for a device, or in C++. Its watchdog prints the verdict in time.

On a CPU, a sleep in one long call takes the place of ``loss.item()`` behind a collective that never ends; tests/gpu has
the real one.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.programs import on_ranks

pytestmark = pytest.mark.slow

HEAD = """
    import datetime, os, sys, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(sys.argv[2])))
    rank, case = dist.get_rank(), sys.argv[1]
    if case in ("late", "raises", "killed") or "device" in sys.argv:  # as if it were on a device
        from ddpstats.guard.pipeline import Watching

        def before(self, call, original=Watching.before):
            call.is_on_host = False
            original(self, call)

        Watching.before = before
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
"""
FAULTY = """
    if case == "differs":
        if rank == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
        else:
            time.sleep(1)
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)
    elif rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
    elif case == "raises":
        raise ValueError("bad batch")
    elif case == "killed":
        os.kill(os.getpid(), 9)
    time.sleep(60)
"""
SAVES = """
    import signal

    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(20)
        print("saved", flush=True)
        os._exit(0)
    dist.all_reduce(torch.ones(1))
    time.sleep(60)
"""
RETURNS = """
    def train():
        work = dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(4)
        dist.all_reduce(torch.ones(1))

    if rank == 1:
        raise ValueError("bad batch")
    train()
"""
LEGAL = """
    if case == "exits early" and rank == 1:
        os._exit(0)
    if case == "catches torch's timeout":
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        ddp(torch.ones(2, 4)).sum().backward()
        if rank == 1:
            time.sleep(15)
        else:
            try:
                ddp(torch.ones(2, 4)).sum().backward()
            except RuntimeError:
                time.sleep(13)  # saves
    if case == "is done before the others":
        time.sleep((5, 0, 8)[rank])
        tensor = torch.ones(1)
        dist.gather(tensor, [torch.ones(1) for _ in range(3)] if rank == 0 else None, dst=0)
        time.sleep((0, 12, 0)[rank])
    if case == "comes later":
        if rank == 1:
            time.sleep(3)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if rank == 0:
            time.sleep(4)
        work.wait()
        assert not dist.all_reduce(torch.ones(1))
    time.sleep(3)
    print("done", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("mode", "case", "text"),
    [
        ("strict", "differs", "What differs: the reduce op"),
        ("step", "raises", "rank 1: left the guard by ValueError: bad batch"),
        ("step", "killed", "rank 1: the process is gone"),
        ("strict", "late", "rank 1: did not take part"),
    ],
)
def test_verdict_is_printed_where_the_program_never_comes_back(script: Any, mode: str, case: str, text: str) -> None:
    began = time.monotonic()
    done = on_ranks("-m", "ddpstats", "run", "--guard", mode, script(HEAD, FAULTY), case, "4")
    assert time.monotonic() - began < 45
    ended = {1, -signal.SIGTERM}  # the first rank that ends ends the others, as torchrun does
    assert done.statuses[0] in ended
    assert done.statuses[1] in ({-signal.SIGKILL} if case == "killed" else ended)
    assert case != "late" or 1 in done.statuses  # the watchdog has ended it
    assert text in done.stderr
    assert done.stderr.count("Last collective on which they agreed: number 3") == 1


@pytest.mark.parametrize(
    ("mode", "waits_in", "case", "ranks", "timeout", "printed"),
    [
        ("step", "device", "exits early", 2, "60", 1),
        ("strict", "device", "comes later", 2, "60", 2),
        ("step", "host", "catches torch's timeout", 2, "4", 2),  # NCCL ends the process in place of an error
        ("step", "device", "is done before the others", 3, "9", 3),
    ],
)
def test_a_program_that_is_right_is_left_alone(
    script: Any, mode: str, waits_in: str, case: str, ranks: int, timeout: str, printed: int
) -> None:
    program = script(HEAD, LEGAL)
    done = on_ranks("-m", "ddpstats", "run", "--guard", mode, program, case, timeout, waits_in, ranks=ranks)
    assert done.statuses == [0] * ranks, done.stderr
    assert done.stdout.count("done") == printed
    assert "Error" not in done.stderr
    assert "RankMissing" not in done.stderr


def test_a_verdict_that_was_printed_early_is_not_repeated_with_its_traceback(script: Any) -> None:
    done = on_ranks("-m", "ddpstats", "run", "--guard", "step", script(HEAD, RETURNS), "raises", "60")
    assert done.statuses == [1, 1]
    assert done.stderr.count("rank 1: left the guard by ValueError: bad batch") >= 1
    assert done.stderr.count("Last collective on which they agreed") == 1
    assert "in train" in done.stderr
    assert "the message is above" in done.stderr


def test_a_rank_that_does_not_wait_for_what_failed_is_not_ended(script: Any) -> None:
    """It may be writing a checkpoint."""
    program, limit = script(HEAD, SAVES), ("--timeout-sec", "3")
    done = on_ranks("-m", "ddpstats", "run", "--guard", "step", *limit, program, "", "60", "device")
    assert done.statuses == [0, 1], done.stderr
    assert "rank 0: did not take part" in done.stderr
    assert "saved" in done.stdout
