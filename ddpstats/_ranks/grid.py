"""A `Comm` of many ranks in a grid, with a gloo group for each line of it: few ranks wait for each other in turn.

gloo's all_reduce is a ring of 2 (N - 1) hops, one after the other, and each rank of a group connects to every other
one. So the ranks of a large group are the cells of a grid, whose first side runs along neighbouring ranks: those of a
host, as launchers number them. A sum goes along one side after the other. Then all ranks hold it with the same bits,
for parallel lines hold the same numbers at the same indices, and add them in the same order.

Ranks that are left over, as 1,021 fill no grid, are guests of one cell each, in a group of two.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ddpstats._ranks.comm import Comm, CommFailed, GlooComm, ReduceOp, Watch, as_byte_tensor, group_ranks
from ddpstats._ranks.store import BoundedStore

# From here on a call in a grid takes less time than in one ring (docs/scale.md).
GRID_FROM_RANKS = 16
_LONGEST_SIDE = 16
_HOPS_TO_BEGIN = 3  # of one more collective: its own cost is small, but each group has three threads


def gloo_comm(group: dist.ProcessGroup, store: BoundedStore, timeout_sec: float, watch: Watch = lambda: None) -> Comm:
    """Connect to the other ranks of ``group``. ``store``: from `group_store`. Raises `CommFailed`."""
    ranks = group_ranks(group)
    kind = GlooComm if len(ranks) < GRID_FROM_RANKS else GridComm
    return kind(ranks, dist.get_rank(), store, timeout_sec, watch)


@functools.cache
def sides_of(world_size: int) -> tuple[int, ...]:
    """Return the grid with the fewest hops; every rank is a cell of it or the guest of one."""
    fitting = (sides for sides in _grids(world_size, _LONGEST_SIDE) if 2 * math.prod(sides) >= world_size)
    return min(fitting, key=lambda sides: hops_of(world_size, sides))


def hops_of(world_size: int, sides: Sequence[int]) -> int:
    """Count the hops of an all_reduce, one after the other, and what it costs to begin a collective for each side."""
    with_guest = math.prod(sides) < world_size
    return sum(2 * (side - 1) + _HOPS_TO_BEGIN for side in sides) + with_guest * (2 + 1 + 2 * _HOPS_TO_BEGIN)


def _grids(cells: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Yield all grids of at most so many cells, the longest side first."""
    yield ()
    for side in range(2, min(cells, longest) + 1):
        yield from ((side, *shorter) for shorter in _grids(cells // side, side))


class GridComm:
    """Real ranks over a few gloo groups for each rank. The contract is that of `Comm`."""

    def __init__(
        self, ranks: tuple[int, ...], rank: int, store: BoundedStore, timeout_sec: float, watch: Watch = lambda: None
    ) -> None:
        """``store``: a part of the group's store that no group has used before. Raises `CommFailed`."""
        self.ranks = ranks
        self.rank = rank
        self._position = ranks.index(rank)
        sides = sides_of(len(ranks))
        self._cells = math.prod(sides)
        self._pair: GlooComm | None = None
        self._lines: list[GlooComm] = []  # along each side
        self.watch: Watch = watch
        grid = weakref.proxy(self)  # a cycle would keep its connections open until Python collects it
        left = _countdown(timeout_sec)

        def connect(name: str, positions: Sequence[int]) -> GlooComm:
            members = tuple(ranks[position] for position in positions)
            return GlooComm(members, rank, store.part(f"{name}/{positions[0]}"), left(), lambda: grid.watch())

        host = self._position % self._cells
        if host + self._cells < len(ranks):
            self._pair = connect("pair", (host, host + self._cells))
        if self._position >= self._cells:
            return
        stride = 1
        for number, side in enumerate(sides):
            first = self._position - self._position // stride % side * stride
            self._lines.append(connect(f"side{number}", range(first, first + side * stride, stride)))
            stride *= side

    def _comms(self) -> list[GlooComm]:
        """Return this rank's groups in the order in which a reduction goes through them."""
        return [*([] if self._pair is None else [self._pair]), *self._lines]

    def all_reduce(self, op: ReduceOp, tensor: torch.Tensor, timeout_sec: float) -> None:
        left = _countdown(timeout_sec)
        for comm in self._comms():
            comm.all_reduce(op, tensor, left())
        if self._pair is not None:
            self._pair.broadcast(tensor, 0, left())

    def all_gather(self, payload: bytes | bytearray, timeout_sec: float) -> Sequence[bytes | bytearray]:
        left, size, cells = _countdown(timeout_sec), len(payload), self._cells
        guests = len(self.ranks) - cells
        block = bytearray(payload)
        if guests:  # each cell with its guest's, or a gap
            block = bytearray().join(self._pair.all_gather(block, left()) if self._pair else (block, bytes(size)))
        for line in self._lines:
            block = bytearray().join(line.all_gather(block, left()))
        if self._pair is not None:
            block = block if self._lines else bytearray(2 * cells * size)
            self._pair.broadcast(as_byte_tensor(block), 0, left())
        step = 2 * size if guests else size
        of_cells = [block[cell * step : cell * step + size] for cell in range(cells)]
        return of_cells + [block[cell * step + size : (cell + 1) * step] for cell in range(guests)]

    def broadcast(self, tensor: torch.Tensor, source: int, timeout_sec: float) -> None:
        left, cell = _countdown(timeout_sec), source % self._cells
        if self._pair is not None and source >= self._cells and self._position % self._cells == cell:
            self._pair.broadcast(tensor, 1, left())  # a guest sends to its cell first
        stride, sides = 1, sides_of(len(self.ranks))
        for line, side in zip(self._lines, sides, strict=False):
            # Only ranks that agree with the source on all later sides are reached along this one.
            if self._position // (stride * side) == cell // (stride * side):
                line.broadcast(tensor, cell // stride % side, left())
            stride *= side
        if self._pair is not None:
            self._pair.broadcast(tensor, 0, left())

    def close(self) -> None:
        for comm in self._comms():
            comm.close()


def _countdown(timeout_sec: float) -> Callable[[], float]:
    """Return a function that says how many seconds are left, and raises `CommFailed` when none are."""
    deadline = time.monotonic() + timeout_sec

    def left() -> float:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise CommFailed(f"no answer for {timeout_sec:.1f} s")
        return seconds

    return left
