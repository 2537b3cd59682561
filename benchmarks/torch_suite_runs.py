"""Run torch's own tests of `torch.distributed` on gloo ranks, with or without a guard: MODE RANKS [NAME ...].

The tests are those of `torch.testing._internal.distributed.distributed_test`, which torch's wheel ships. Their own
runner starts an interpreter for each rank; this one forks ranks from a process that has imported torch.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
from contextlib import nullcontext
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

LIMIT_SEC = 60.0  # of one test; without a guard the longest takes a few seconds
LONGER_SEC = {"test_ddp_uneven_inputs": 200.0}

directory = Path(tempfile.mkdtemp(prefix="ddpstats-torch-suite-"))


def main(mode: str, world_size: str, *names: str) -> None:
    """Print one line of JSON: test -> "passed", "skipped", or what went wrong."""
    meeting_file = directory / "meeting"
    os.environ.update(BACKEND="gloo", WORLD_SIZE=world_size, INIT_METHOD=meeting_file.as_uri())
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", TEMP_DIR=str(directory))
    stand_in: Any = types.ModuleType("expecttest")  # a library whose base class torch's tests have, and do not use here
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.distributed import distributed_test

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    barrier: Any = distributed_test.Barrier
    skips = {skip.exit_code for skip in TEST_SKIPS.values()}
    (directory / "barrier").mkdir()
    (directory / "test_dir").mkdir()
    outcomes = {}
    for name in names or unittest.defaultTestLoader.getTestCaseNames(Suite):
        meeting_file.unlink(missing_ok=True)
        barrier.init()
        started = time.monotonic()
        statuses = _run(Suite, name, mode, int(world_size))
        if set(statuses) == {0}:
            outcomes[name] = "passed"
        elif skips.intersection(statuses):
            outcomes[name] = "skipped"
        else:
            outcomes[name] = f"ranks ended with {statuses}"
        if outcomes[name] != "skipped":
            print(f"{mode} {name}: {outcomes[name]}, {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(outcomes))


def _run(suite: Any, name: str, mode: str, world_size: int) -> list[int | None]:
    """Return the exit status of each rank; None where it was killed at the time limit."""
    meeting_file = tempfile.mktemp(dir=directory)
    pids = [_fork(suite, name, mode, rank, meeting_file) for rank in range(world_size)]
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + LONGER_SEC.get(name, LIMIT_SEC)
    while len(statuses) < world_size and time.monotonic() < deadline:
        for pid in set(pids).difference(statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for pid in set(pids).difference(statuses):
        os.kill(pid, signal.SIGABRT)  # `faulthandler` prints where it hangs
        os.waitpid(pid, 0)
    return [statuses.get(pid) for pid in pids]


def _fork(suite: Any, name: str, mode: str, rank: int, meeting_file: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        faulthandler.enable()
        _be_rank(suite, name, mode, rank, meeting_file)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _be_rank(suite: Any, name: str, mode: str, rank: int, meeting_file: str) -> None:
    from ddpstats.guard import collective_guard

    os.environ["RANK"] = str(rank)
    os.dup2(2, 1)  # stdout is for the result alone
    theirs, mine = Pipe()  # the one that the test closes, and the one that it would hear its runner on
    try:
        with nullcontext() if mode == "bare" else collective_guard(mode):  # type: ignore[arg-type]
            suite._run(rank, name, meeting_file, theirs)
    finally:
        while mine.poll():
            try:
                print(f"rank {rank}: {mine.recv()}", file=sys.stderr)
            except EOFError:
                break


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
