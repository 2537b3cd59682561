"""Many ranks, computed from few: what grows with the number of ranks, times what one of it costs here.

gloo's algorithms are read from its source (allreduce.cc, allgather.cc, broadcast.cc). torch leaves it the choice, so an
all_reduce is a ring that passes 2 (N - 1) hops, an all_gather one of N - 1, a broadcast a binary tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from _scale_counts import Phase
from _scale_ranks import World

from ddpstats._ranks.grid import GRID_FROM_RANKS, sides_of
from ddpstats._ranks.store import shared_poll

HELLO_BYTES = 74
_LOOK_SEC = 1.0  # of a rank that waits
_HEAD_BYTES = 24  # that each rank tells where all they hold would be too much


@dataclass(frozen=True)
class Constants:
    """``room_bytes``: what one rank tells the others when there is a new key, beside 50 others."""

    hop_sec: float
    store_request_sec: float
    connection_kib: float
    first_use_requests: float
    room_bytes: float


MEASURED = Constants(140e-6, 17.5e-6, 1.0, 12.25, 2048.0)
"""Of the machine of docs/scale.md, for a run that measures no real ranks."""


def constants_of(worlds: Sequence[World], phases: Sequence[Phase], store_request_us: float) -> Constants:
    rings = sorted((world for world in worlds if not world.grid), key=lambda world: world.world_size)
    few, many = rings[0], rings[-1]
    more = many.median.private_kib - few.median.private_kib
    new_key = next(phase for phase in phases if phase.name == "one new key")
    steady = next(phase for phase in phases if phase.name == "steady")
    return Constants(
        few.median.call_ms / 1e3 / ring_hops(few.world_size),
        store_request_us / 1e6,
        max(0.0, more / max(1, many.world_size - few.world_size)),
        next(phase.per_rank("requests") for phase in phases if phase.name == "first use"),
        new_key.per_rank("sent_bytes") - steady.per_rank("sent_bytes"),
    )


def ring_hops(world_size: int) -> int:
    """Of an all_reduce, one after the other."""
    return 2 * (world_size - 1)


def grid_hops(world_size: int) -> int:
    """Of an all_reduce along the sides of the grid in turn, with a guest's way in and out."""
    sides = sides_of(world_size)
    return sum(map(ring_hops, sides)) + (3 if math.prod(sides) < world_size else 0)


def predicted(world_size: int, constants: Constants) -> dict[str, float]:
    """What the table shows: names with units."""
    told = (_HEAD_BYTES + constants.room_bytes) * world_size
    looks = world_size / shared_poll(_LOOK_SEC, world_size)
    in_grid = world_size >= GRID_FROM_RANKS
    peers = sum(side - 1 for side in sides_of(world_size)) + 1 if in_grid else world_size - 1
    return {
        "a call in one ring, ms": 1e3 * ring_hops(world_size) * constants.hop_sec,
        "a call in the grid, ms": 1e3 * grid_hops(world_size) * constants.hop_sec,
        "received at a new key, MB": told / 1e6,
        "received at the handshake, MB": HELLO_BYTES * world_size / 1e6,
        "first use, the store is busy, s": constants.first_use_requests * world_size * constants.store_request_sec,
        "all wait, requests at the store per s": looks,
        "all wait, share of the store's core": looks * constants.store_request_sec,
        "open connections of a rank": peers,
        "memory of these, MB": peers * constants.connection_kib / 1024,
        "if every pair were connected, MB": (world_size - 1) * constants.connection_kib / 1024,
    }


def draw(path: str, phases: Sequence[Phase], constants: Constants) -> None:
    """Write the PNG: what is counted over the number of ranks, and what the model says of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.8), dpi=110, layout="constrained")
    names = ("first use", "waiting", "guard, several hosts: compares", "guard, verdict")
    _panel(left, phases, dict(zip(names, "osD^", strict=True)), "keys")
    left.set(title="keys asked of the store", ylabel="per rank (one look, one comparison)")
    _panel(middle, phases, dict(zip(("handshake", "steady", "one new key"), "osD", strict=True)), "received_bytes")
    middle.set(title="received in collectives, 50 keys", ylabel="bytes per rank and call")
    sizes = [2**power for power in range(1, 18)]
    for name, style in (("a call in one ring, ms", "-"), ("a call in the grid, ms", "--")):
        right.plot(sizes, [predicted(size, constants)[name] for size in sizes], style, label=name, lw=2)
    right.set(title="model: one reduction", xlabel="ranks", ylabel="ms", xscale="log", yscale="log")
    for axes in (left, middle, right):
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def _panel(axes: Any, phases: Sequence[Phase], markers: dict[str, str], what: str) -> None:
    for name, marker in markers.items():
        points = sorted((one.world_size, one.per_rank(what)) for one in phases if one.name == name)
        axes.plot([x for x, _ in points], [y for _, y in points], "-", marker=marker, label=name, lw=2, ms=6)
    axes.set(xlabel="ranks", xscale="log", yscale="log")
