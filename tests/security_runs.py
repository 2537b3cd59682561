"""What runs on the ranks of `test_security`."""

from __future__ import annotations

import os
import re
import socket
import struct
from pathlib import Path

import torch
import torch.distributed as dist

import ddpstats

_LISTENS = "0A"


def listening() -> list[str]:
    """The addresses on which this process listens, one for each socket."""
    mine = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # that of the listing itself
            continue
        mine |= set(re.findall(r"socket:\[(\d+)\]", target))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in mine:
                found.append(_address(fields[1].partition(":")[0]))
    return sorted(found)


def _address(digits: str) -> str:
    words = struct.pack(f"={len(digits) // 8}I", *(int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


def before_and_after() -> tuple[list[str], list[str]]:
    """Where this process listens after torch alone has communicated, and while we do."""
    dist.all_reduce(torch.ones(1))
    before = listening()
    with ddpstats.collective_guard("strict"):
        dist.all_reduce(torch.ones(1))
        ddpstats.reduce_stats({"x": 1.0})
        ddpstats.any_rank(True)
        return before, listening()
