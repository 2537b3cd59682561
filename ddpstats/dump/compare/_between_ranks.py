"""The ranks of one run, compared with each other: what has to be equal between them, and who differs.

1. Take from every rank the entries that have to agree: a module's parameters (by NAME), and what a collective gives to
   every member alike (all_reduce, broadcast, all_gather), matched within its group by the number that our dumps give
   it there, else by its number among the calls of its kind. With ``everything``, all entries, for runs in which all
   ranks were given the same batch. Sharded parameters are left out: every rank has a part of its own.
2. Read all ranks in step; an entry that all its ranks have given is judged and forgotten. Collectives without a number
   are kept to the end, for their entries stand in the order in which they ended.
3. More than half of the ranks with the same values are right; the others are named. Two ranks, or no majority: that
   they differ is said, and that nobody can tell which is wrong.

Statistics that are equal do not prove equal tensors: dump with summary_mode md5, or task tensor, for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpstats._base.rank_names import ranks_text
from ddpstats.dump.compare._rows import Mode
from ddpstats.dump.format._entries import STATISTICS, DumpEntry, DumpLeaf, read_collective
from ddpstats.dump.format._files import RankDump, rank_of
from ddpstats.dump.format._names import parse_name
from ddpstats.dump.format._scan import Progress

KEPT_DIVERGENCES = 1000

_ALIKE = ("all_reduce", "broadcast", "all_gather", "_all_gather")
_COMPARED = ("dtype", "shape", *STATISTICS, "md5", "nan_count", "inf_count")

Digest = Callable[[RankDump, DumpLeaf], object]


@dataclass(frozen=True)
class RankDifference:
    """A tensor that should be equal on some ranks, and is not.

    Attributes:
        index: of the entry, on the lowest of these ranks.
        entry: its NAME there.
        path: of the tensor in it; empty where ranks lack the whole entry.
        by_rank: what each of the ranks has; None where it lacks it.
        culprits: the ranks that differ from more than half of them; empty where there is no majority.
        missing: the ranks that lack the entry, ascending.
    """

    index: int
    entry: str
    path: str
    by_rank: Mapping[int, DumpLeaf | None]
    culprits: tuple[int, ...]
    missing: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.entry}.{self.path}" if self.path else self.entry

    @property
    def verdict(self) -> str:
        if self.missing:
            return f"{ranks_text(self.missing)} lack{'s' * (len(self.missing) == 1)} this entry"
        if self.culprits:
            differ = f"differ{'s' * (len(self.culprits) == 1)}"
            return f"{ranks_text(self.culprits)} {differ} from the majority"
        if len(self.by_rank) == 2:
            return "two ranks differ: which of them is wrong cannot be told"
        return "no values are those of more than half of the ranks: which are wrong cannot be told"


@dataclass
class BetweenRanks:
    """What was found between ranks.

    Attributes:
        mode: what was compared besides statistics.
        parameters: tensors that all ranks have and that are parameters; `results` of collectives; `others`.
        different: of all these, those that are not equal.
        lacking: entries that some rank lacks.
        sharded: tensors that were not compared: every rank has a part of its own of them.
        skipped: collectives of which some rank has no output (it was still running when the step ended), and those of
            a group that does not hold the rank.
        absent: ranks that a group has and this step has not.
        divergences: the first in execution order; at most `KEPT_DIVERGENCES`.
    """

    dumps: tuple[RankDump, ...]
    everything: bool
    mode: Mode = "statistics"
    parameters: int = 0
    results: int = 0
    others: int = 0
    different: int = 0
    lacking: int = 0
    sharded: int = 0
    skipped: int = 0
    absent: set[int] = field(default_factory=set)
    divergences: list[RankDifference] = field(default_factory=list)

    @property
    def compared(self) -> int:
        return self.parameters + self.results + self.others

    @property
    def nothing(self) -> bool:
        """Whether there was nothing to compare."""
        return not self.compared and not self.differs

    @property
    def differs(self) -> bool:
        return bool(self.different or self.lacking)

    def count(self, path: str, *, is_result: bool) -> None:
        """A tensor that was compared."""
        if is_result:
            self.results += 1
        elif path.startswith("parameters."):
            self.parameters += 1
        else:
            self.others += 1

    def add(self, found: RankDifference) -> None:
        if found.missing:
            self.lacking += 1
        else:
            self.different += 1
        self.divergences.append(found)
        if len(self.divergences) > 2 * KEPT_DIVERGENCES:
            self.trim()

    def trim(self) -> None:
        self.divergences = sorted(self.divergences, key=lambda one: one.index)[:KEPT_DIVERGENCES]


@dataclass(slots=True)
class _Item:
    """One rank's part in something that should be equal."""

    index: int
    entry: str
    ranks: frozenset[int]
    leaves: dict[str, DumpLeaf]
    number: int | None = None  # of a collective: among the calls of its kind on this rank
    is_matched: bool = True  # by its key alone


def compare_ranks(
    dumps: Sequence[RankDump],
    *,
    everything: bool,
    mode: Mode = "md5",
    digest: Digest | None = None,
    progress: Progress | None = None,
) -> BetweenRanks:
    """Compare the ranks of one step.

    Args:
        dumps: one per rank, each with a number of its own.
        everything: whether every entry has to be equal, not only parameters and what collectives give to all.
        mode: with ``statistics`` checksums are not compared.
        digest: of a saved tensor's elements; compared besides the statistics.
        progress: called with the number of bytes after each read.
    """
    found = BetweenRanks(tuple(dumps), everything, mode)
    by_rank = {rank_of(dump): dump for dump in dumps}
    streams = {rank: _items(dump, rank, found, progress) for rank, dump in by_rank.items()}
    waiting: dict[tuple[Any, ...], dict[int, _Item]] = {}
    collectives: dict[tuple[Any, ...], dict[int, list[_Item]]] = {}
    for rank, key, item in _in_step(streams):
        if not item.is_matched:
            collectives.setdefault(key, {}).setdefault(rank, []).append(item)
            continue
        parts = waiting.setdefault(key, {})
        parts[rank] = item
        if len(parts) == len(item.ranks):
            _judge(found, waiting.pop(key), by_rank, digest)
    for key, of_group in collectives.items():
        waiting.update(_matched(key, of_group))
    for parts in waiting.values():
        if len(parts) == len(parts[min(parts)].ranks):
            _judge(found, parts, by_rank, digest)
        else:
            _lacking(found, parts)
    found.trim()
    return found


def _matched(
    key: tuple[Any, ...], of_group: Mapping[int, list[_Item]]
) -> Iterator[tuple[tuple[Any, ...], dict[int, _Item]]]:
    """Collectives of one kind in one group, by their numbers: their entries stand in the order in which they ended."""
    in_order = {rank: sorted(items, key=lambda item: item.number or 0) for rank, items in of_group.items()}
    for place in range(max(map(len, in_order.values()))):
        yield (*key, place), {rank: items[place] for rank, items in in_order.items() if place < len(items)}


def _lacking(found: BetweenRanks, parts: Mapping[int, _Item]) -> None:
    item = parts[min(parts)]
    leaves = {rank: next(iter(parts[rank].leaves.values()), None) if rank in parts else None for rank in item.ranks}
    missing = tuple(sorted(item.ranks - set(parts)))
    found.add(RankDifference(item.index, item.entry, "", dict(sorted(leaves.items())), (), missing))


def _in_step(streams: Mapping[int, Iterator[tuple[Any, _Item]]]) -> Iterator[tuple[int, Any, _Item]]:
    """One of each rank in turn, so that little waits for its partners."""
    open_streams = dict(streams)
    while open_streams:
        for rank in list(open_streams):
            taken = next(open_streams[rank], None)
            if taken is None:
                del open_streams[rank]
            else:
                yield rank, *taken


def _items(
    dump: RankDump, rank: int, found: BetweenRanks, progress: Progress | None
) -> Iterator[tuple[tuple[Any, ...], _Item]]:
    everyone, everything = frozenset(map(rank_of, found.dumps)), found.everything
    counts: Counter[tuple[Any, ...]] = Counter()
    for index, member in enumerate(dump.members(progress)):
        is_collective = member.key.startswith("Distributed.")
        if not everything and not is_collective and '"parameters"' not in member.text:
            continue
        entry = dump.entry(member)
        if is_collective:
            taken = _collective(entry, index, rank, everyone, found)
        else:
            leaves = {path: leaf for path, leaf in entry.leaves() if everything or path.startswith("parameters.")}
            taken = (entry.name,), _Item(index, entry.name, everyone, leaves)
        if taken is not None and (taken[1].leaves or is_collective):
            counts[taken[0]] += not is_collective  # a NAME may be there twice
            yield (*taken[0], counts[taken[0]]), taken[1]


def _collective(
    entry: DumpEntry, index: int, rank: int, everyone: frozenset[int], found: BetweenRanks
) -> tuple[tuple[Any, ...], _Item] | None:
    name = parse_name(entry.name)
    api = name.api
    if not api.startswith(_ALIKE):
        return None
    call = read_collective(entry, name, rank)
    ranks = frozenset(call.ranks) or everyone
    found.absent |= ranks - everyone
    if rank not in ranks:
        found.skipped += 1
        return None
    key = (api, tuple(sorted(ranks)), call.group, call.sequence)
    has_number = call.sequence is not None
    return key, _Item(index, entry.name, ranks & everyone, dict(call.made), call.number, has_number)


def _judge(
    found: BetweenRanks, parts: Mapping[int, _Item], by_rank: Mapping[int, RankDump], digest: Digest | None
) -> None:
    lowest = parts[min(parts)]
    if lowest.number is not None and not all(part.leaves for part in parts.values()):
        found.skipped += 1
        return
    if len(parts) < 2:
        return  # its other members are not here: there is nothing to compare it with
    for path in {path: None for part in parts.values() for path in part.leaves}:
        leaves = {rank: parts[rank].leaves.get(path) for rank in sorted(parts)}
        if any(map(_is_sharded, leaves.values())):
            found.sharded += 1
            continue
        found.count(path, is_result=lowest.number is not None)
        signs = {rank: _sign(leaf, by_rank[rank], found.mode, digest) for rank, leaf in leaves.items()}
        if len(set(signs.values())) > 1:
            most, count = Counter(signs.values()).most_common(1)[0]
            culprits = tuple(rank for rank, sign in signs.items() if sign != most) if 2 * count > len(signs) else ()
            found.add(RankDifference(lowest.index, lowest.entry, path, leaves, culprits))


def _is_sharded(leaf: DumpLeaf | None) -> bool:
    """Whether its numbers are those of this rank's part, of a DTensor: "R" is a whole copy."""
    placements = None if leaf is None else leaf.raw.get("placements")
    return isinstance(placements, list) and any(one != "R" for one in placements)


def _sign(leaf: DumpLeaf | None, dump: RankDump, mode: Mode, digest: Digest | None) -> tuple[object, ...]:
    if leaf is None:
        return ()
    more = digest(dump, leaf) if digest is not None and leaf.data_name is not None else None
    compared = (key for key in _COMPARED if key != "md5" or mode != "statistics")
    return (*(repr(leaf.raw.get(key)) for key in compared), more)
