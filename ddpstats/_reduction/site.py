"""What all ranks agreed on for one name, and which of its slots are still used."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import ClassVar

from ddpstats._base.caches import BoundedCache
from ddpstats._base.paths import Step
from ddpstats._ranks.agreement import Site
from ddpstats._reduction import slots
from ddpstats._reduction.held_keys import HeldKeys
from ddpstats._reduction.layout import Layout, Placement, Selection, prune
from ddpstats._reduction.nesting import Builder
from ddpstats._reduction.schema import EMPTY, Container, Node, is_flat, is_sequence, iter_slots, marker_count
from ddpstats._reduction.tree import Structure
from ddpstats._reduction.wire import encode_holding, encode_schema, numbers_bytes

# A slot that no rank used for this many calls of its name is dropped, so that generated key names cannot pile up; at a
# renegotiation, unused slots beyond this multiple of the used ones are dropped as well, the longest unused first. But
# there only where an eighth of all slots can go: to drop a few of a thousand in each of many exchanges costs more than
# to carry them to the next.
RETENTION_CALLS = 256
_UNUSED_PER_USED, _UNUSED_AT_LEAST = 4, 1024
_WORTH_DROPPING = 8
_EMPTY = encode_schema(EMPTY)


@dataclass
class Used:
    """A selection, its slots' codes, and the last call that showed it."""

    selection: Selection
    codes: bytes
    call: int
    aged: int = -1
    """The call up to which `ReductionSite.last_used` knows of it."""


@dataclass
class ReductionSite(Site):
    """What all ranks agreed on for one name, and what this rank derived from it."""

    layout: Layout = field(default_factory=Layout)
    calls: int = 0
    whole_call: int = -1
    last_used: array[int] = field(default_factory=lambda: array("q"))
    unbuildable: tuple[str, ...] = ()

    extra_bytes: ClassVar[int] = numbers_bytes(0)

    def __post_init__(self) -> None:
        self.placements: BoundedCache[Structure, Placement] = BoundedCache(64, 262_144)
        self.selections: BoundedCache[bytes, Used] = BoundedCache(16, 65_536, self._age)
        self.builders: BoundedCache[Selection, Builder] = BoundedCache(16, 65_536)
        self.held_keys = HeldKeys()

    @property
    def agreed(self) -> bytes:
        return self.layout.fingerprint

    @property
    def body(self) -> bytes:
        return encode_holding(self.unbuildable, _EMPTY)

    def lanes(self, world_size: int) -> int:
        return slots.lanes_needed(self.layout.size)

    def adopt(self, layout: Layout) -> None:
        """Go over to ``layout``; what was known of slots that stay is kept."""
        self._flush()
        are_plain = _are_plain(self.layout.root, layout.root)
        if are_plain and _keys_of(layout.root)[: self.layout.size] == _keys_of(self.layout.root):
            self.last_used += array("q", [self.calls]) * (layout.size - self.layout.size)  # new ones come last
        else:
            slots_of = _keys_of if are_plain else iter_slots
            known = dict(zip(slots_of(self.layout.root), self.last_used, strict=True))
            self.last_used = array("q", map(known.get, slots_of(layout.root), repeat(self.calls)))
        self.layout = layout
        self.seals.clear()
        self.placements.clear()
        self.selections.clear()
        self.builders.clear()

    def without_unused(self, oldest: int) -> Layout:
        """The layout without the slots that no rank used since call ``oldest``."""
        self._flush()
        if self.whole_call >= oldest:
            return self.layout
        if not self.last_used or min(self.last_used) >= oldest:
            return self.layout
        held = bytes(map(oldest.__le__, self.last_used))
        return Layout(prune(self.layout.root, held)[0], self.layout.unbuildable)

    def oldest_kept(self) -> int:
        """The call such that slots unused since may go, at a renegotiation."""
        self._flush()
        calls = sorted(self.last_used)  # almost sorted already: new slots come last
        unused = bisect_left(calls, self.calls - 1)
        room = max(_UNUSED_AT_LEAST, _UNUSED_PER_USED * (len(calls) - unused))
        limit = calls[unused - 1 - room] + 1 if unused > room else 0
        oldest = max(limit, self.calls - RETENTION_CALLS)
        return oldest if bisect_left(calls, oldest) * _WORTH_DROPPING >= len(calls) else 0

    def _flush(self) -> None:
        for used in self.selections.values():
            self._age(used)

    def _age(self, used: Used) -> None:
        if used.aged == used.call:
            return
        used.aged = used.call
        for slot in compress(range(len(self.last_used)), memoryview(used.codes).cast("d")):
            if self.last_used[slot] < used.call:
                self.last_used[slot] = used.call


def _are_plain(*roots: Node) -> bool:
    """Whether their keys tell their slots apart, as `iter_slots` does, with less work: flat mappings."""
    return all(
        isinstance(root, Container) and not marker_count(root) and not is_sequence(root.kinds[0]) and is_flat(root)
        for root in roots
    )


def _keys_of(root: Node) -> tuple[Step, ...]:
    return root.keys if isinstance(root, Container) else ()
