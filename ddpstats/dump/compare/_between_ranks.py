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

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ddpstats._base.text import count_of, printable, ranks_text
from ddpstats.dump.compare._rows import Mode
from ddpstats.dump.msprobe import parse_name, read_collective
from ddpstats.dump.reader import STATISTICS, DumpEntry, DumpLeaf, RankDump, notes_of, rank_of, ranks_without_dump

KEPT_DIVERGENCES = 1000

_ALIKE = ("all_reduce", "broadcast", "all_gather", "_all_gather")
_COMPARED = ("dtype", "shape", *STATISTICS, "md5", "nan_count", "inf_count")

_Key = tuple[Any, ...]
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

    def as_json(self) -> dict[str, Any]:
        return {
            **{key: getattr(self, key) for key in ("name", "entry", "path", "index", "verdict")},
            "culprit_ranks": list(self.culprits),
            "missing_ranks": list(self.missing),
            "by_rank": {str(rank): leaf and leaf.raw for rank, leaf in self.by_rank.items()},
        }

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
        parameters: tensors that all ranks have and that are parameters; `results` of collectives; `compared`: all.
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
    compared: int = 0
    different: int = 0
    lacking: int = 0
    sharded: int = 0
    skipped: int = 0
    absent: set[int] = field(default_factory=set)
    divergences: list[RankDifference] = field(default_factory=list)

    @property
    def nothing(self) -> bool:
        """Whether there was nothing to compare."""
        return not self.compared and not self.differs

    @property
    def differs(self) -> bool:
        return bool(self.different or self.lacking)

    def add(self, found: RankDifference) -> None:
        self.lacking += bool(found.missing)
        self.different += not found.missing
        insort(self.divergences, found, key=attrgetter("index"))
        del self.divergences[KEPT_DIVERGENCES:]


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
) -> BetweenRanks:
    """Compare the ranks of one step.

    Args:
        dumps: one per rank, each with a number of its own.
        everything: whether every entry has to be equal, not only parameters and what collectives give to all.
        mode: with ``statistics`` checksums are not compared.
        digest: of a saved tensor's elements; compared besides the statistics.
    """
    found = BetweenRanks(tuple(dumps), everything, mode)
    by_rank = {rank_of(dump): dump for dump in dumps}
    streams = {rank: _items(dump, rank, found) for rank, dump in by_rank.items()}
    waiting: dict[_Key, dict[int, _Item]] = {}
    collectives: dict[_Key, dict[int, list[_Item]]] = {}
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
    return found


def _matched(key: _Key, of_group: Mapping[int, list[_Item]]) -> Iterator[tuple[_Key, dict[int, _Item]]]:
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


def _items(dump: RankDump, rank: int, found: BetweenRanks) -> Iterator[tuple[_Key, _Item]]:
    everyone, everything = frozenset(map(rank_of, found.dumps)), found.everything
    counts: Counter[_Key] = Counter()
    for index, member in enumerate(dump.members()):
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
) -> tuple[_Key, _Item] | None:
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
        is_parameter = lowest.number is None and path.startswith("parameters.")
        found.results += lowest.number is not None
        found.parameters += is_parameter
        found.compared += 1
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


# -- in words, for JSON and as a table --------------------------------------------------------------------------------


def as_text(found: BetweenRanks) -> str:
    """For people."""
    return printable(_lines(found))


def _lines(found: BetweenRanks) -> list[str]:
    ranks = ranks_text([rank_of(dump) for dump in found.dumps])
    lines = [f"{ranks} of {found.dumps[0].directory.parent}", *_left_out(found)]
    if found.nothing:
        return ["NOTHING TO COMPARE: " + lines[0], *lines[1:], *_NOTHING]
    if not found.divergences:
        equal = f"NOTHING DIFFERENT: {_counted(found)} are equal {_EQUAL[found.mode]} between "
        return [equal + lines[0], *lines[1:], *notes_of(found.dumps)]
    lacking = f"; {count_of(found.lacking, 'entries')} not on every rank" if found.lacking else ""
    lines[0] = f"DIFFERENT: of {_counted(found)}, {found.different:,} differ between {lines[0]}{lacking}"
    first = found.divergences[0]
    lines += ["", "first that differs:", f"  {first.entry}  {first.path}", f"    {first.verdict}"]
    lines += [f"    rank {rank}: {_values(leaf)}" for rank, leaf in list(first.by_rank.items())[:8]]
    lowest = next(dump for dump in found.dumps if rank_of(dump) == min(first.by_rank))
    lines += [f"    {line}" for line in lowest.place_of(first.entry)]
    if len(found.divergences) > 1:
        count = found.different + found.lacking
        lines += ["", f"in execution order, {min(20, count)} of {count:,}:"]
        lines += [f"  {one.name}  {one.verdict}" for one in found.divergences[:20]]
    return [*lines, *(f"  {note}" for note in notes_of(found.dumps)), "", *_NEXT]


def _counted(found: BetweenRanks) -> str:
    kinds = [(found.parameters, "parameters"), (found.results, "results of collectives")]
    if found.everything:
        kinds.append((found.compared - found.parameters - found.results, "other tensors"))
    return "{} and {}".format(", ".join(count_of(*kind) for kind in kinds[:-1]), count_of(*kinds[-1]))


def _left_out(found: BetweenRanks) -> Iterator[str]:
    """What was not compared, and why."""
    for dump in found.dumps:
        if not dump.complete:
            yield f"  {dump.path}: incomplete: the run ended inside this step"
    for name in ranks_without_dump(found.dumps[0].directory.parent):
        yield f"  {name} has no dump: it ended before its first entry, or was not copied"
    if found.absent:
        yield f"  groups have ranks of which no dump is here: {ranks_text(found.absent)}"
    if found.sharded:
        many = "s were" if found.sharded != 1 else " was"
        yield f"  {found.sharded:,} sharded tensor{many} not compared: every rank has a part of its own"
    if found.skipped:
        yield (
            f"  {count_of(found.skipped, 'collectives')} left out: without an output on some rank, or of a group that "
            "does not hold the rank"
        )
    if not found.parameters and not found.nothing:
        if {dump.level for dump in found.dumps} == {"L1"}:
            yield "  no parameters in these dumps (level L1): use level L0 or mix"
        elif not found.sharded:
            yield "  no parameters were compared (data_mode, scope or list left them out, or a rank lacks them)"


_EQUAL: dict[Mode, str] = {
    "statistics": "in all their statistics (which does not prove equal tensors)",
    "md5": "in their statistics and checksums",
    "tensor": "in all their statistics, and byte by byte where they were saved,",
}
_NOTHING = (
    "  no entry has parameters, and there are no results of all_reduce, broadcast or all_gather. Dump with level L0 or",
    "  mix; or give --everything, if all ranks were given the same batch.",
)
_NEXT = (
    "Next: compare the rank that differs with another one: ddpstats compare STEP/rankX STEP/rankY. If parameters",
    "differ, look at the step before: whether its gradients were reduced on every rank.",
)


def _values(leaf: DumpLeaf | None) -> str:
    if leaf is None:
        return "has none"
    shown = [f"{key} {leaf.raw.get(key)!r}" for key in (*STATISTICS, "md5") if leaf.raw.get(key) is not None]
    return f"{leaf.dtype} {list(leaf.shape)} {' '.join(shown)}"


def as_json(found: BetweenRanks) -> dict[str, Any]:
    divergences = [one.as_json() for one in found.divergences]
    return {
        "verdict": "nothing to compare" if found.nothing else "different" if found.differs else "nothing different",
        **{key: getattr(found, key) for key in ("everything", "mode", "compared", "different", "sharded", "skipped")},
        "compared_parameters": found.parameters,
        "compared_results": found.results,
        "not_on_every_rank": found.lacking,
        "ranks": [rank_of(dump) for dump in found.dumps],
        "ranks_without_dump": ranks_without_dump(found.dumps[0].directory.parent),
        "ranks_of_groups_without_dump": sorted(found.absent),
        "incomplete_ranks": [rank_of(dump) for dump in found.dumps if not dump.complete],
        "first": divergences[0] if divergences else None,
        "divergences": divergences,
        "notes": notes_of(found.dumps),
    }


def table(found: BetweenRanks) -> Iterator[list[Any]]:
    """Rows of a CSV file, its header first: one per tensor and rank."""
    yield ["Name", "Rank", "Dtype", "Tensor Shape", "Max", "Min", "Mean", "L2norm", "MD5", "Differs", "Err_message"]
    for one in found.divergences:
        for rank, leaf in one.by_rank.items():
            shown = ["N/A"] * 7
            if leaf is not None:
                raw = [leaf.raw.get(key) for key in (*STATISTICS, "md5")]
                shown = [leaf.dtype, str(list(leaf.shape)), *("N/A" if value is None else str(value) for value in raw)]
            differs = str(rank in one.culprits) if one.culprits else "N/A"
            yield [one.name, rank, *shown, differs, one.verdict]
