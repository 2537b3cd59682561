"""Programs for the ranks of `test_fork`: a process that rank 0 forks inside of a guard, and that leaves it."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

from ddpstats._base import marks
from ddpstats._ranks.gloo import group_around
from ddpstats.guard import collective_guard
from ddpstats.guard.watch import Records

LIMIT_SEC = 30.0


def forked_inside(mode: Any, directory: str) -> tuple[int, str, int, tuple[int, int]]:
    """What the forked process ended with; of this rank: how it says to have left, its steps, what the guard counted."""
    rank = os.getpid()
    try:
        with collective_guard(mode, record_dir=directory, timeout_sec=LIMIT_SEC) as guard:
            dist.all_reduce(torch.ones(1))
            status = _ended_after(_fork(guard)) if dist.get_rank() == 0 else 0
            found = Records(directory).look()[-1]
            dist.all_reduce(torch.ones(1))
            guard.step()
    except BaseException as error:
        if os.getpid() != rank:
            os._exit(0 if isinstance(error, SystemExit) else 9)
        raise
    return status, found.left, found.steps, (guard.counters.collectives, guard.counters.compared)


def _fork(guard: collective_guard) -> int:
    """In the forked process all that a guard notes happens once more, before it ends as a program does.

    Its collective is of torch's backend "fake": gloo looks up this host's name, and waits forever in a process that was
    forked while another thread did so.
    """
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(LIMIT_SEC / 2, exit=True)
        logging.getLogger("ddpstats").addHandler(_Silence())
        group = group_around(FakeProcessGroup._create_internal(0, 1), HashStore(), 0, 1, "forked process")
        group.allreduce([torch.ones(1)]).wait()
        guard.step()
        guard._watching.recording.step(guard)
        marks.publish("sentinel", "found by the forked process")
        sys.exit(0)
    return pid


class _Silence(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        os._exit(8)


def _ended_after(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
