"""A process that a rank forks is under no guard, and leaves memory, store, record and notes of the rank alone."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

from ddpstats._base import marks
from ddpstats._ranks.gloo import group_around
from ddpstats.guard import collective_guard
from ddpstats.guard.record import read_records
from ddpstats.guard.watch import Records
from ddpstats.testing import run_ranks

# -- what runs on the ranks -------------------------------------------------------------------------------------------


LIMIT_SEC = 30.0


def forked_inside(mode: Any, directory: str) -> tuple[int, str, int, tuple[int, int]]:
    """Return the status of the forked process, and how this rank left, its steps, and what the guard counted."""
    rank = os.getpid()
    try:
        with collective_guard(mode, record_dir=directory, timeout_sec=LIMIT_SEC) as guard:
            dist.all_reduce(torch.ones(1))
            status = _ended_after(_fork(guard)) if dist.get_rank() == 0 else 0
            shown = Records(directory).look()[-1]
            dist.all_reduce(torch.ones(1))
            guard.step()
    except BaseException as error:
        if os.getpid() != rank:
            os._exit(0 if isinstance(error, SystemExit) else 9)
        raise
    return status, shown.left, shown.steps, (guard.counters.collectives, guard.counters.compared)


def _fork(guard: collective_guard) -> int:
    """Fork a process, in which all that a guard notes happens once more, and which ends as a program does.

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


def forked_while_another_thread_records(directory: str) -> list[int | None]:
    """Return the statuses of forked processes; None where one does not end."""
    is_over = threading.Event()
    with collective_guard("record", record_dir=directory) as guard:

        def record() -> None:
            while not is_over.is_set():
                guard._watching.recording.note(steps=1)

        writer = threading.Thread(target=record)
        writer.start()
        try:
            return [_status_of_fork() for _ in range(5)]
        finally:
            is_over.set()
            writer.join()


def _status_of_fork() -> int | None:
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join(LIMIT_SEC / 2)
    status = process.exitcode
    process.kill()
    process.join()
    return status


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", ["step", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("strict", "record"))]
)
def test_forked_process_that_leaves_the_guard_touches_nothing_of_the_ranks(mode: str, tmp_path: Path) -> None:
    compared = 0 if mode == "record" else 2
    endings = run_ranks(forked_inside, 2, mode, str(tmp_path), timeout_sec=90).values()
    assert endings == [(0, "", 0, (2, compared))] * 2
    for record in read_records(tmp_path):
        assert [event.seq for event in record.events] == [1, 2]
        assert record.marks == ()
        lines = (tmp_path / f"rank{record.rank}.jsonl").read_text().splitlines()
        assert ['"end"' in line for line in lines] == [False] * (len(lines) - 1) + [True]


def test_process_that_is_forked_while_another_thread_records_does_not_hang(tmp_path: Path) -> None:
    assert run_ranks(forked_while_another_thread_records, 1, str(tmp_path), timeout_sec=120).values() == [[0] * 5]
