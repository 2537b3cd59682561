"""The id of another process, as its rank would send it, and its state."""

from __future__ import annotations

import dataclasses
import sys
import time

import pytest

from ddpstats._ranks.failure import ProcessId

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def _fields(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def id_of(pid: int) -> ProcessId:
    return dataclasses.replace(ProcessId.mine(), pid=pid, started=int(_fields(pid)[19]))


def state_of(pid: int) -> str:
    """Return the letter that /proc gives, "Z" for a zombie; "" where there is no such process."""
    try:
        return _fields(pid)[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until_ended(pid: int) -> None:
    """Wait until the process is a zombie or gone."""
    deadline = time.monotonic() + 30
    while state_of(pid) not in ("", "Z"):
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.01)
