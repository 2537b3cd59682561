"""The faults of a rank, or of the directory that ranks write to, by real signals, limits and file systems."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.phases import PHASES

INTERRUPT_AFTER_SEC = 0.5


@dataclass(frozen=True)
class Case:
    """One cell of the table. The victim is the last rank, or the first where that serves the store.

    ``timeout_sec``: of our calls. ``late_sec``: how long a slow rank is away; then the timeout is this much longer.
    """

    phase: str
    fault: str
    ranks: int
    timeout_sec: float = 5.0
    late_sec: float = 20.0

    @property
    def victim(self) -> int:
        return 0 if FAULTS[self.fault].serves else self.ranks - 1

    @property
    def limit_sec(self) -> float:
        """The timeout that the ranks are given."""
        return self.timeout_sec + self.late_sec * (self.fault == "late")

    @property
    def ends_in_error(self) -> bool:
        """True where the other ranks can only miss the victim; otherwise the call succeeds."""
        fault = FAULTS[self.fault]
        return fault.loses and (self.phase, self.fault) not in _HANDLED

    @property
    def is_own_error(self) -> bool:
        """Whether each rank raises one that names its own file: where `StatsDump.start` cannot begin one."""
        return self.phase == "dump" and FAULTS[self.fault].on_disk


_HANDLED = {("bundle", "exception"), ("dump", "exception")}
"""What cannot be written is told in the verdict, or warned of, and the ranks stay together."""


def cells(ranks: int, timeout_sec: float, late_sec: float) -> list[Case]:
    """Return every case of the table for that many ranks, but those in which no rank waits (a dump without one)."""
    return [
        Case(phase, fault, ranks, timeout_sec, late_sec)
        for fault in FAULTS
        for phase in PHASES
        if not (FAULTS[fault].waits and PHASES[phase].writes)
    ]


@dataclass(frozen=True)
class Fault:
    """``hurt``: done by the victim at the phase's point; ``around``: entered by all ranks, with the directory.

    ``loses``: the victim takes no further part. ``serves``: it serves the store. ``waits``: the others come when it
    has happened. ``on_disk``: it is a small file system that fails.
    """

    words: str
    hurt: Callable[[Case], object] = lambda case: None
    around: Callable[[Case, int, Path], contextlib.AbstractContextManager[None]] = field(
        default=lambda case, rank, directory: contextlib.nullcontext()
    )
    loses: bool = True
    serves: bool = False
    waits: bool = False
    on_disk: bool = False


def _kill(case: Case) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(case: Case) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # until the driver has it go on


def _raise(case: Case) -> None:
    raise MemoryError("of the test")


def _interrupt(case: Case) -> None:
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _interrupted_later(case: Case, rank: int, directory: Path) -> Iterator[None]:
    """While the victim waits for the others, who come later."""
    timer = threading.Timer(INTERRUPT_AFTER_SEC, os.kill, (os.getpid(), signal.SIGINT))
    if rank == case.victim:
        timer.start()
    yield


def _sleep(case: Case) -> None:
    time.sleep(case.late_sec)


@contextlib.contextmanager
def _full(case: Case, rank: int, directory: Path) -> Iterator[None]:
    """Fill the file system of the directory to the last byte."""
    if rank == 0:
        with open(directory / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
    yield


@contextlib.contextmanager
def _limited(case: Case, rank: int, directory: Path) -> Iterator[None]:
    """The victim alone may write no file that is larger than a page."""
    if rank != case.victim:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def _read_only(case: Case, rank: int, directory: Path) -> Iterator[None]:
    if rank == 0:
        subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True, timeout=20)
    yield


FAULTS = {
    "kill": Fault("SIGKILL", _kill),
    "stop": Fault("SIGSTOP, SIGCONT after the timeout", _stop),
    "exception": Fault("an exception (MemoryError)", _raise),
    "interrupt": Fault("KeyboardInterrupt at work", _interrupt),
    "interrupt waiting": Fault("KeyboardInterrupt while it waits", around=_interrupted_later, waits=True),
    "late": Fault("20 s late", _sleep, loses=False),
    "host": Fault("SIGKILL, and it served the store", _kill, serves=True),
    "full": Fault("disk full", around=_full, loses=False, on_disk=True),
    "limited": Fault("disk full for one rank (RLIMIT_FSIZE)", around=_limited, loses=False),
    "read-only": Fault("read-only directory", around=_read_only, loses=False, on_disk=True),
}


class CannotMount(OSError):
    """This process may not mount a file system."""


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """Mount a file system of 4 MiB on that directory. Raises `CannotMount`."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "ddpstats-test", str(directory)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise CannotMount(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=20)
