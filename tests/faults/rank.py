"""One rank of a case; `cases` starts it, and reads from its stdout what it saw.

python -m tests.faults.rank CASE RANK PORT DIRECTORY
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpstats.errors import DdpstatsError
from tests.faults.injuries import FAULTS, Case
from tests.faults.phases import PHASES, hurt_at

_COMES_SEC = 60.0  # a rank that waits for the fault to have happened elsewhere
_LEAVES_SEC = 10.0  # what ends by itself


def outcome_of(call: Callable[[], Any]) -> tuple[dict[str, Any], BaseException | None]:
    """Return what came of a call, with the time on the clock that all processes of a machine share, and its error."""
    try:
        value, error = call(), None
    except BaseException as raised:
        value, error = None, raised
    at, missing = time.monotonic(), getattr(error, "missing_ranks", ())
    kind = "" if error is None else type(error).__name__
    ours = isinstance(error, DdpstatsError)
    return {
        "raised": kind,
        "ours": ours,
        "text": str(error or ""),
        "value": value,
        "missing": list(missing),
        "at": at,
    }, error


def play(case: Case, rank: int, directory: Path) -> dict[str, Any]:
    phase, fault, disk = PHASES[case.phase], FAULTS[case.fault], directory / "disk"
    happened = directory / "happened"

    def hurt() -> None:
        happened.write_text(str(time.monotonic()))
        fault.hurt(case)

    report: dict[str, Any] = {}
    ends: list[BaseException | None] = []

    def use() -> None:
        with phase.made(disk) as call:
            call(False)
            dist.barrier()
            with contextlib.ExitStack() as stack:
                stack.enter_context(fault.around(case, rank, disk))
                if not fault.waits:
                    dist.barrier()
                if rank == case.victim:
                    stack.enter_context(hurt_at(phase, hurt))
                    happened.write_text(str(time.monotonic()))  # where a disk is at fault; otherwise the point says it
                elif fault.waits:
                    _wait_for(directory / "left")
                report["first"], error = outcome_of(lambda: call(True))
                if fault.waits and rank != case.victim and error is None:  # what it had begun may come to its end
                    report["first"], error = outcome_of(lambda: call(True))
                if fault.waits and rank == case.victim:
                    happened.write_text(str(report["first"]["at"]))
                    (directory / "left").touch()
            report["again"], _ = outcome_of(lambda: call(False)) if isinstance(error, DdpstatsError) else (None, None)
            ends.append(error)
            if error is not None:
                raise error  # through what the program has open, as it would be

    report["leaves"], _ = outcome_of(use)
    report["left"] = _left()
    return report


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _COMES_SEC
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} does not come")
        time.sleep(0.02)


def _left() -> list[str]:
    """Return what should have ended: threads of ddpstats, children, shared memory without a name."""
    deadline = time.monotonic() + _LEAVES_SEC
    while (left := _now()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _now() -> list[str]:
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ddpstats")]
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            left += [f"child {pid}" for pid in (task / "children").read_text().split()]
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "/memfd:ddpstats" in os.readlink(file):
                left.append(os.readlink(file))
    return left


def main(text: str, rank: int, port: int, directory: Path) -> None:
    case = Case(**json.loads(text))
    torch.set_num_threads(1)
    os.environ["DDPSTATS_TIMEOUT_SEC"] = str(case.limit_sec)
    tempfile.tempdir = str(directory / "disk" / "tmp")
    (directory / f"pid{rank}").write_text(str(os.getpid()))
    dist.init_process_group(  # the first rank serves the store, or is a client of the driver's as under torchrun
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=case.ranks,
        timeout=timedelta(seconds=300),
    )
    report = play(case, rank, directory)
    print(json.dumps({**report, "ended": time.monotonic()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
