"""Which process another one is, as its rank would say."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from ddpstats._transport.roster import ProcessId

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def id_of(pid: int) -> ProcessId:
    with open(f"/proc/{pid}/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19])
    return dataclasses.replace(ProcessId.mine(), pid=pid, started=started)
