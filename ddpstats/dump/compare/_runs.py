"""Where in memory two tensors differ: runs of differing elements, and what their size and place speak for.

A wrong computation differs in scattered places or everywhere. Memory that another kernel wrote over differs in one
contiguous block, often of a size that is a power of two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KEPT_RUNS = 1000
_SHOWN_RUNS = 4
_FEW_RUNS = 8


@dataclass(frozen=True)
class Runs:
    """Runs of elements that differ, in flat memory order.

    Attributes:
        elements: of the whole tensor.
        differing: elements that differ.
        count: how many runs there are.
        largest: elements of the largest.
        first: the first ones, as (start, stop) with stop excluded; at most `KEPT_RUNS`.
        item_bytes: of one element.
        flipped_bits: in how many bits the only differing element differs; None where there are more, or none
            can tell.
        is_dense: the tensor has no gaps in memory, so that neighbours in it are neighbours there.
    """

    elements: int
    differing: int
    count: int
    largest: int
    first: tuple[tuple[int, int], ...]
    item_bytes: int
    flipped_bits: int | None = None
    is_dense: bool = True

    def describe(self) -> str:
        """In words."""
        if not self.count:
            return f"all {self.elements:,} elements are equal"
        if self.differing == self.elements:
            return f"all {self.elements:,} elements differ: no block of memory stands out"
        if self.count == 1:
            return self._one(*self.first[0])
        share = f"{self.differing:,} of {self.elements:,} elements differ, in {self.count:,} runs"
        shown = ", ".join(_words(start, stop) for start, stop in self.first[:_SHOWN_RUNS])
        more = ", ..." if self.count > _SHOWN_RUNS else ""
        if self.is_dense and self.count <= _FEW_RUNS and self.largest * self.count >= 64:
            sizes = {stop - start for start, stop in self.first}
            same = f" of {_size(self.largest, self.item_bytes)} each" if len(sizes) == 1 else ""
            return f"{share}{same}: {shown}{more}; a few contiguous blocks, which memory written over looks like"
        return f"{share}, the largest of {self.largest:,}: {shown}{more}; scattered, as computed values differ"

    def _one(self, start: int, stop: int) -> str:
        where = f"{_words(start, stop)} of {self.elements} differ{'s' * (stop - start == 1)}"
        if stop - start == 1:
            return f"{where}: a single one" + (", by a single bit: a flipped one" if self.flipped_bits == 1 else "")
        if not self.is_dense:
            return f"{where}: in a row, in a view with gaps"
        speaks = ", which is what a buffer overwritten in memory looks like" if stop - start >= 16 else ""
        return f"{where}: contiguous, {_size(stop - start, self.item_bytes)}{speaks}"


class RunCollector:
    """Collects runs that come in ascending order, in pieces: those that touch are joined."""

    def __init__(self) -> None:
        self._first: list[tuple[int, int]] = []
        self._open: tuple[int, int] | None = None
        self._count = self._differing = self._largest = 0

    def add(self, start: int, stop: int) -> None:
        """One run, [start, stop), behind all before."""
        if self._open is not None and self._open[1] == start:
            self._open = (self._open[0], stop)
            return
        self._close()
        self._open = (start, stop)

    def add_unlisted(self, count: int, differing: int, largest: int) -> None:
        """Runs of which only the numbers are kept; they touch neither the one before nor the one after."""
        self._close()
        self._count += count
        self._differing += differing
        self._largest = max(self._largest, largest)

    def result(self, elements: int, item_bytes: int) -> Runs:
        self._close()
        return Runs(elements, self._differing, self._count, self._largest, tuple(self._first), item_bytes)

    def _close(self) -> None:
        if self._open is None:
            return
        start, stop = self._open
        self._open = None
        self.add_unlisted(1, stop - start, stop - start)
        if len(self._first) < KEPT_RUNS:
            self._first.append((start, stop))


def runs_of(positions: Iterable[int], elements: int, item_bytes: int) -> Runs:
    """Runs of ascending positions."""
    collector = RunCollector()
    for position in positions:
        collector.add(position, position + 1)
    return collector.result(elements, item_bytes)


def _words(start: int, stop: int) -> str:
    return f"element {start}" if stop - start == 1 else f"elements {start}..{stop - 1}"


def _size(elements: int, item_bytes: int) -> str:
    size = elements * item_bytes
    power = " (a power of two)" if size & (size - 1) == 0 else ""
    return f"{elements:,} element{'s' * (elements != 1)} = {_bytes(size)}{power}"


def _bytes(size: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            whole, rest = divmod(size, scale)
            return f"{whole:,} {unit}" if not rest else f"{size / scale:,.1f} {unit}"
    return f"{size:,} bytes"
