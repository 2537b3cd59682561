"""Two dumps side by side: the entries of one NAME together, in one pass through both files.

1. Take the next entry of A. If B's entry of that NAME was met before, read it again at its place.
2. Else go on in B until it comes, at most `_WINDOW` entries further. What B has in between is remembered by NAME and
   place in the file, not by content.
3. What has not come by then waits in the same way for B to reach it; its pair is given later than its turn.
4. At the end of both, what still waits is on one side only.

So memory is what the two orders differ by, not the size of the dumps. Where one dump has a NAME twice, the first goes
with the other's first, the second with the second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from ddpstats.dump.format._scan import Member

_WINDOW = 4096  # entries that one dump may have more than the other in one place, before pairs come late


class MemberSource(Protocol):
    def members(self) -> Iterator[Member]: ...

    def reread(self, kind: type[Member], key: str, offset: int, size: int) -> Member:
        """The member of which only the place was kept."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What two dumps have under one NAME; None for the one that lacks it.

    Attributes:
        index: the entry's place in A, in B where A has none; from 0.
    """

    index: int
    a: Member | None
    b: Member | None


class _Waiting:
    """Members of one dump whose partner has not come: NAME -> places."""

    def __init__(self, source: MemberSource) -> None:
        self._source = source
        self._places: dict[str, deque[tuple[int, type[Member], int, int]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def keep(self, index: int, member: Member) -> None:
        place = (index, type(member), member.offset, len(member.text))
        self._places.setdefault(member.key, deque()).append(place)

    def take(self, key: str) -> tuple[int, Member] | None:
        places = self._places.get(key)
        if places is None:
            return None
        index, kind, offset, size = places.popleft()
        if not places:
            del self._places[key]
        return index, self._source.reread(kind, key, offset, size)

    def all(self) -> Iterator[tuple[int, Member]]:
        order = sorted((place[0], key) for key, places in self._places.items() for place in places)
        for _, key in order:
            taken = self.take(key)
            assert taken is not None
            yield taken


def pairs(a: MemberSource, b: MemberSource) -> Iterator[Pair]:
    """All entries of both, by NAME; nearly in the order of A. Raises what reading raises."""
    of_a, of_b = _Waiting(a), _Waiting(b)
    theirs = enumerate(b.members())
    for index, mine in enumerate(a.members()):
        before = of_b.take(mine.key)
        found = before[1] if before is not None else None
        if found is None:
            for place, other in islice(theirs, max(1, _WINDOW - len(of_b))):
                if other.key == mine.key and mine.key not in of_a:
                    found = other
                    break
                yield from _late(place, other, of_a, of_b)
        if found is None:
            of_a.keep(index, mine)
        else:
            yield Pair(index, mine, found)
    for place, other in theirs:
        yield from _late(place, other, of_a, of_b)
    yield from (Pair(index, mine, None) for index, mine in of_a.all())
    yield from (Pair(place, None, other) for place, other in of_b.all())


def _late(place: int, other: Member, of_a: _Waiting, of_b: _Waiting) -> Iterator[Pair]:
    """An entry of B that nobody asks for now: its partner waits already, or it waits for it."""
    waited = of_a.take(other.key)
    if waited is None:
        of_b.keep(place, other)
    else:
        yield Pair(waited[0], waited[1], other)
