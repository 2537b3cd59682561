"""Which tensor is which: what is not finite is followed from entry to entry, and leads back to where it began.

1. A tensor of our own dumps is known by its storage, its place in it, and its statistics; others by these alone. Where
   two look alike, it is the newer one: whoever made something last made what is seen next.
2. A trace ends where nothing takes the tensor any more. It goes on where an entry makes another out of it that is not
   finite either; and it is over where an entry makes something finite out of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from ddpstats.dump.format._entries import DumpLeaf
from ddpstats.dump.origin._candidates import Candidate, Late

_MAX_TRACES = 65_536
_T = TypeVar("_T")


@dataclass(eq=False)
class Trace:
    """A tensor that is not finite, as an entry had it.

    Attributes:
        cause: where that began; None: infinities that were put there on purpose.
        maker: name of the entry.
        storage: its number; None where the dump does not say.
        counts: its end matters. Not that of memory as it was handed out, nor that of what arrived: nothing used it.
        requires_grad: as the dump has it.
        after: how many entries of backward passes came before.
        is_kept: its maker wrote it in place.
        in_graph: the backward pass of its maker came.
        is_open: nothing took it so far.
        perhaps: of a presumed mask that arrived: what it is if it proves to be none.
    """

    cause: Candidate | None
    maker: str
    storage: int | None
    counts: bool
    requires_grad: bool
    after: int = 0
    is_kept: bool = False
    in_graph: bool = False
    is_open: bool = True
    perhaps: Candidate | None = None

    def close(self) -> None:
        """An entry took it."""
        if self.is_open:
            self.is_open = False
            self._count(-1)

    def joins_graph(self) -> None:
        if self.is_open and not self.in_graph:
            self.in_graph = True
            if self.cause is not None and self.counts:
                self.cause.ends_graph += 1

    def opened(self) -> Trace:
        self._count(1)
        return self

    def _count(self, by: int) -> None:
        if self.cause is not None and self.counts:
            self.cause.ends += by
            self.cause.ends_grad += by * self.requires_grad
            self.cause.ends_graph += by * self.in_graph
            self._count_late(self.cause, by)

    def _count_late(self, cause: Candidate, by: int) -> None:
        if cause.late.after != self.after:
            if by < 0:
                return
            cause.late = Late(self.after)
        cause.late.grad += by * self.requires_grad
        cause.late.kept += by * self.is_kept


class Traces:
    """The traces of one rank; the oldest are forgotten where there are too many."""

    def __init__(self) -> None:
        self._by_look: dict[str, Trace] = {}
        self._by_place: dict[str, Trace] = {}
        self._by_maker: dict[str, list[Trace]] = {}

    def find(self, leaf: DumpLeaf) -> Trace | None:
        look, place = _look(leaf), _place(leaf)
        if place is not None and (found := self._by_place.get(place + look)) is not None:
            return found
        found = self._by_look.get(look)
        if found is not None and None not in (place, found.storage) and not found.is_open:
            return None  # it looks like one that is known to have gone elsewhere, and is another one
        return found

    def add(self, leaf: DumpLeaf, trace: Trace) -> None:
        """From now on, ``leaf`` is ``trace``."""
        look, place = _look(leaf), _place(leaf)
        _put(self._by_look, look, trace)
        if place is not None:
            _put(self._by_place, place + look, trace)
        if trace.counts and trace.cause is not None:
            _put(self._by_maker, trace.maker, [*self._by_maker.get(trace.maker, ()), trace])

    def backward_of(self, forward: str) -> None:
        """The backward pass of an entry came."""
        for trace in self._by_maker.pop(forward, ()):
            trace.joins_graph()


def _put(held: dict[str, _T], key: str, value: _T) -> None:
    held.pop(key, None)
    if len(held) >= _MAX_TRACES:
        del held[next(iter(held))]
    held[key] = value


def _look(leaf: DumpLeaf) -> str:
    """Tells tensors apart as well as statistics can."""
    raw = leaf.raw
    return repr([raw.get(key) for key in ("shape", "Max", "Min", "Mean", "Norm", "nan_count", "first_bad")])


def _place(leaf: DumpLeaf) -> str | None:
    return None if leaf.storage_id is None else f"{leaf.storage_id} {leaf.storage_offset} "
