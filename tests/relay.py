"""A bad link between two network namespaces: packets are late, and some of them lost.

    python -m tests.relay NEAR FAR LINK DELAY_SEC LOSS SEED

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
import select
import struct
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000
MOST_BYTES = 1 << 16


def device_in(space: str, name: str) -> int:
    """The program's end of a device in that namespace, in which this process is afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{space}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {space}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def relay(ends: tuple[int, int], delay_sec: float, loss: float, chance: random.Random) -> None:
    """Until stdin ends."""
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
