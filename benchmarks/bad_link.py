"""A bad link between two network namespaces: packets are late, and some of them lost. `bad_link` runs this program:

    python -m benchmarks.bad_link NEAR FAR LINK DELAY_SEC LOSS SEED

LINK is the name of a TUN device that is made in each of the namespaces; what one sends comes out of the other,
DELAY_SEC later, but for the share LOSS, drawn with SEED. "ready" is printed when the devices are there. A line "down"
on stdin loses everything from then on, "up" ends that, and the end of stdin ends the link.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import secrets
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.hosts import FAR, NEAR, ip, skip_where_not_allowed, two_namespaces
from tests.needs import ROOT

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000
MOST_BYTES = 1 << 16


class BadLink(NamedTuple):
    """Two network namespaces, the name that the link between them has in both, and the program that carries it."""

    near: str
    far: str
    link: str
    program: subprocess.Popen[str]

    def set(self, state: str) -> None:
        """Lose all packets from "down" to "up"."""
        assert self.program.stdin is not None
        self.program.stdin.write(state + "\n")
        self.program.stdin.flush()


@contextlib.contextmanager
def bad_link(delay_sec: float, loss: float, seed: int = 0) -> Iterator[BadLink]:
    """Make a link on which a packet takes so long, each way, and is lost so often. Skips where it cannot be made."""
    link = f"dt{secrets.token_hex(3)}"
    with two_namespaces() as (near, far), contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "benchmarks.bad_link", near, far, link, str(delay_sec), str(loss), str(seed)]
        program = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, stderr=-1, text=True))
        stack.callback(program.kill)
        assert program.stdout is not None
        assert program.stderr is not None
        if program.stdout.readline().strip() != "ready":
            pytest.skip(f"no TUN device can be made here: {program.stderr.read().strip().splitlines()[-1]}")
        with skip_where_not_allowed():
            for namespace, own, other in ((near, NEAR, FAR), (far, FAR, NEAR)):
                ip("-n", namespace, "addr", "add", own, "peer", other, "dev", link)
                ip("-n", namespace, "link", "set", link, "up")
        yield BadLink(near, far, link, program)


# -- the program ------------------------------------------------------------------------------------------------------


def device_in(namespace: str, name: str) -> int:
    """Enter the namespace, make a device there, and return the program's end of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def relay(ends: tuple[int, int], delay_sec: float, loss: float, chance: random.Random) -> None:
    """Carry packets between the two ends until stdin ends."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    late: list[tuple[float, int, int, bytes]] = []  # when it is due, its number, where it goes
    count, is_up = 0, True
    while True:
        due = late[0][0] - time.monotonic() if late else None
        readable, _, _ = select.select([*ends, sys.stdin], [], [], None if due is None else max(0.0, due))
        if sys.stdin in readable:
            line = sys.stdin.readline()
            if not line:
                return
            is_up = line.strip() == "up"
        for end in ends:
            if end in readable:
                packet = os.read(end, MOST_BYTES)
                if is_up and chance.random() >= loss:
                    count += 1
                    heapq.heappush(late, (time.monotonic() + delay_sec, count, other[end], packet))
        while late and late[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(late)
            with contextlib.suppress(OSError):  # a device that is not up yet loses it, too
                os.write(end, packet)


if __name__ == "__main__":
    near, far, link, delay_sec, loss, seed = sys.argv[1:]
    devices = device_in(near, link), device_in(far, link)
    print("ready", flush=True)
    relay(devices, float(delay_sec), float(loss), random.Random(int(seed)))
