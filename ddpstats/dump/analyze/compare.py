"""``ddpstats compare A B``: two runs; ``ddpstats compare A``: the ranks of one run.

1. A comparison has sides: A and B, for every rank that both runs have, or the ranks of one run.
2. Entries are paired by name, in the first side's order (`pair_entries`); what two tools call by two names has one name
   here (`msprobe.common_names`). Two runs should be equal in everything, ranks in their parameters and the results of
   collectives (`entries_of_ranks`).
3. `Comparer` compares each tensor and value X on all sides: by its elements, its checksum or its statistics, the first
   of these that both dumps hold. Sides with equal values form a group; the largest group is the reference (of two runs
   it is B), and a side that differs is compared with it by msprobe's formulas.

Exit status 0 if nothing is different, 1 if something is, 2 if the dumps cannot be read or there is nothing to compare.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddpstats._base.text import check_writable, print_report, ranks_text, shorten
from ddpstats.dump import msprobe, statistics
from ddpstats.dump.analyze import (
    DumpEntry,
    DumpLeaf,
    EntryText,
    RankDump,
    find_ranks,
    notes_of,
    printable_errors,
    rank_of,
    ranks_without_dump,
)
from ddpstats.errors import DumpError

if TYPE_CHECKING:
    from ddpstats.dump.analyze.tensors import Closeness

CompareMode = Literal["tensor", "md5", "statistics"]
LeavesByName = Mapping[str, DumpLeaf]

MODES: tuple[CompareMode, ...] = ("tensor", "md5", "statistics")  # what says most is first
KEPT_ROWS = 1000
_FIRST_ENTRIES = 200  # show what a dump holds
_CHECKSUM = re.compile(r'"md5":\s*"')
COMPARED: dict[CompareMode, str] = {"tensor": "elements", "md5": "checksum", "statistics": "statistics"}
NONFINITE = "NaN or infinity on one side only"
NOTHING_COMPARED = 2  # the status of a comparison of nothing: a success would be taken for equal dumps

EPILOG = """examples:
  ddpstats compare dumps/now dumps/last_week
  ddpstats compare dumps/now                  the ranks of one run with one another
  ddpstats compare dumps/now --ranks 0,2      only those that hold the same parameters"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="the run in question: a dump, step, rank or dump.json")
    parser.add_argument("b", metavar="B", type=Path, nargs="?", help="the reference; without it A's ranks are compared")
    parser.add_argument("--step", type=int, metavar="N", help="which step of dumps that have several")
    parser.add_argument("--ranks", type=rank_numbers, metavar="0,2-5", help="only these ranks (default: all)")
    parser.add_argument("--mode", choices=MODES, help="what is compared at most (default: what all dumps hold)")
    parser.add_argument(
        "--tolerance", type=ratio, metavar="RATIO", help="a relative error above it counts (default: 0.5 between runs)"
    )
    parser.add_argument("--exact", action="store_true", help="any inequality counts (default between ranks)")
    parser.add_argument(
        "--tensor",
        nargs="+",
        metavar="NAME.path",
        help="compare one tensor, or two of different names, A's with B's (without B: both of A); goes last",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a table; one per rank where there are several")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser")


def rank_numbers(text: str) -> list[range]:
    ends = [part.partition("-") for part in text.split(",")]
    return [range(int(first), int(last or first) + 1) for first, _, last in ends]


def ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def run(args: argparse.Namespace) -> int:
    """Raises `DumpError` for what cannot be read, or does not belong together."""
    from ddpstats.dump.analyze import report

    check_writable(args.csv, args.html)
    with printable_errors():
        findings = compare(args)
        text = report.as_text(findings)
    if args.html is not None:  # before the text: its reader may have gone
        report.write_page(args.html, findings, text)
    return print_report(findings.status, args.json, lambda: text, lambda: asdict(findings))


# -- findings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeafVerdict:
    """The result of comparing a tensor or value of a side with the reference's.

    Attributes:
        result: msprobe's word: ``Warning``, ``Different``, ``No`` or ``N/A``; otherwise ``Pass``, ``Yes`` or empty.
        compared: "elements", "checksum", "statistics" or "value"; empty where they cannot be compared.
        unequal: anything differs, however small.
        message: why.
        errors: of each statistic, the difference and the relative error; None where a side has no such number.
    """

    result: str
    compared: str
    unequal: bool
    message: str = ""
    errors: Mapping[str, msprobe.StatisticDifference] = field(default_factory=dict)
    closeness: Closeness | None = None

    @property
    def failed(self) -> bool:
        """Return whether it is over the tolerance, or cannot be compared."""
        return self.result in msprobe.FAILED


@dataclass
class LeafRow:
    """A tensor or value X on all sides.

    Attributes:
        names: the NAMEs of its entry, by side; a side that has no such entry is not there.
        leaves: what the dumps have, by side.
        sides: the two that the verdict is about: one that differs, where one does, and the reference.
        groups: the sides by equal values.
        culprits: the sides that differ from more than half of them.
        highlight: why it is worth a look.
        parent, stack: of the call, of a row that differs.
    """

    path: str
    names: Mapping[str, str]
    leaves: Mapping[str, Mapping[str, Any] | None]
    sides: tuple[str, str]
    groups: list[list[str]]
    culprits: list[str]
    verdict: LeafVerdict
    highlight: str = ""
    parent: str | list[str] | None = None
    stack: Sequence[str] = ()

    @property
    def max_error(self) -> float | None:
        return self.verdict.errors.get("Max", (None, None))[1]

    @property
    def entry(self) -> str:
        """Return the NAME on the first side that has it."""
        return next(iter(self.names.values()))

    def name(self, side: str = "") -> str:
        """Return NAME.path on this side."""
        entry = self.names.get(side, self.entry)
        return f"{entry}.{self.path}" if self.path else entry


@dataclass
class Comparison:
    """The numbers of what was compared between sides, and the rows that differ.

    Attributes:
        ranks: the rank of which two runs are compared, or the ranks that are.
        sides: label -> path of the dump.
        incomplete: sides whose run ended inside the step.
        entries: those that all sides have; ``lacking``: by side, those that it lacks and another has.
        compared: numbers of tensors by how they were compared.
        unequal, failed: numbers of rows in which anything differs, and of those that are over the tolerance or cannot
            be compared; ``unequal_tensors``, ``failed_tensors``: those of them that are in ``compared``.
        left_out: what was not compared, and why.
        rows: the first rows that fail, and the first others that are unequal, in the first side's order.
    """

    ranks: list[int]
    sides: dict[str, str]
    incomplete: list[str]
    entries: int = 0
    lacking: dict[str, int] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    unequal: int = 0
    failed: int = 0
    unequal_tensors: int = 0
    failed_tensors: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    rows: list[LeafRow] = field(default_factory=list)

    def add(self, row: LeafRow) -> None:
        unequal, failed = row.verdict.unequal, row.verdict.failed
        if not row.verdict.compared and not unequal:
            tally(self.left_out, row.verdict.message)
        elif row.verdict.compared not in ("", "value"):
            tally(self.compared, row.verdict.compared)
            self.unequal_tensors += unequal
            self.failed_tensors += failed
        self.unequal += unequal
        self.failed += failed
        if unequal and (self.failed if failed else self.unequal - self.failed) <= KEPT_ROWS:
            self.rows.append(row)


@dataclass(frozen=True)
class CompareFindings:
    """The result; ``--json`` prints ``asdict`` of it.

    Attributes:
        status: the exit status.
        exact: any inequality counts, not only those over the tolerance.
        lacking: by side, the ranks that it lacks and the other one has.
        notes: what could not be read, and whether the sides are of different levels or steps.
    """

    status: int
    mode: CompareMode
    tolerance: float
    exact: bool
    lacking: dict[str, list[int]]
    comparisons: list[Comparison]
    notes: list[str]

    def total(self, name: str) -> int:
        return sum(getattr(comparison, name) for comparison in self.comparisons)


# -- which dumps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A dump that is compared with others, and what the report calls it: "A", "B", "rank 3"."""

    label: str
    dump: RankDump


def compare(args: argparse.Namespace) -> CompareFindings:
    """Compare what the arguments choose, and write the table."""
    from ddpstats.dump.analyze.report import write_table

    steps = [_step_directory(path, args.step) for path in (args.a, args.b) if path is not None]
    ranks = [_ranks_of(step, args) for step in steps]
    lacking: dict[str, list[int]] = {}
    between_ranks = args.b is None and not args.tensor
    if args.tensor:
        tasks = [[Side("A", _only_rank(ranks[0])), Side("B", _only_rank(ranks[-1]))]]
    elif between_ranks:
        tasks = [[Side(f"rank {rank_of(dump)}", dump) for dump in ranks[0]]]
        if len(ranks[0]) < 2:
            raise DumpError(f"{args.a} is one rank: give a second dump, or a step with its ranks.", path=str(args.a))
    else:
        tasks = _pair_ranks(ranks[0], ranks[1], lacking)
    dumps = [side.dump for sides in tasks for side in sides]
    mode: CompareMode = args.mode or ("tensor" if args.tensor else _mode_of(dumps))
    comparer = Comparer(mode, msprobe.TOLERANCE if args.tolerance is None else args.tolerance)
    comparisons = []
    for sides in tasks:
        ranks_in = [rank_of(side.dump) for side in (sides if between_ranks else sides[:1])]
        incomplete = [side.label for side in sides if not side.dump.complete]
        comparison = Comparison(ranks_in, {side.label: str(side.dump.path) for side in sides}, incomplete)
        if args.tensor:
            entries = entries_of_names(sides, args.tensor)
        elif between_ranks:
            entries = entries_of_ranks(sides, comparison.left_out)
        else:
            entries = entries_of_runs(sides, comparison.left_out)
        rows = comparer.compare(sides, entries, comparison)
        if args.csv is None:
            deque(rows, maxlen=0)
        else:
            suffix = f"_rank{rank_of(sides[0].dump)}" if len(tasks) > 1 else ""
            write_table(args.csv.with_stem(args.csv.stem + suffix), rows, mode)
        comparisons.append(comparison)
    if args.mode and not any(COMPARED[mode] in each.compared for each in comparisons):
        raise DumpError(
            f"--mode {mode}: no tensor has its {COMPARED[mode]} in all of these dumps. Leave --mode out, or dump the "
            "step again with task tensor or summary_mode md5."
        )
    exact = args.exact or (between_ranks and args.tolerance is None)
    is_different = bool(lacking) or any(each.unequal if exact else each.failed for each in comparisons)
    is_empty = not any(each.compared or each.unequal for each in comparisons)
    missing = [f"{step / name} has no dump" for step in steps for name in ranks_without_dump(step)]
    return CompareFindings(
        1 if is_different else NOTHING_COMPARED if is_empty else 0,
        mode,
        comparer.tolerance,
        exact,
        lacking,
        comparisons,
        [*missing, *_find_differences(tasks[0]), *notes_of(dumps)],
    )


def _step_directory(path: Path, step: int | None) -> Path:
    """Return the directory of the step in a dump's root; of any other path, that."""
    steps = msprobe.steps_in(path)
    if step is None:
        return next(iter(steps.values())) if len(steps) == 1 else path
    return steps.get(step, path)


def _ranks_of(path: Path, args: argparse.Namespace) -> list[RankDump]:
    dumps = find_ranks(path)
    if args.ranks is not None:
        dumps = [dump for dump in dumps if any(rank_of(dump) in ranks for ranks in args.ranks)]
    if not dumps:
        raise DumpError(f"{path} has none of the ranks that --ranks names.", path=str(path))
    if args.step is not None and dumps[0].step not in (args.step, None):
        raise DumpError(f"{path} is of step {dumps[0].step}, not {args.step}.", path=str(path))
    return dumps


def _only_rank(dumps: Sequence[RankDump]) -> RankDump:
    if len(dumps) > 1:
        ranks, step = ranks_text([rank_of(dump) for dump in dumps]), dumps[0].directory.parent
        raise DumpError(f"{step} has {ranks}. Choose one with --ranks, or give its directory.", path=str(step))
    return dumps[0]


def _pair_ranks(
    ranks_a: Sequence[RankDump], ranks_b: Sequence[RankDump], lacking: dict[str, list[int]]
) -> list[list[Side]]:
    """Return the sides of every rank that both runs have; what a run lacks is added to ``lacking``."""
    by_rank_a, by_rank_b = ({rank_of(dump): dump for dump in dumps} for dumps in (ranks_a, ranks_b))
    if len(by_rank_a) == len(by_rank_b) == 1:  # whatever their numbers: two ranks may well be compared
        by_rank_b = dict.fromkeys(by_rank_a, ranks_b[0])
    if not by_rank_a.keys() & by_rank_b.keys():
        raise DumpError(
            f"no rank is in both dumps: A has {ranks_text(by_rank_a)}, B has {ranks_text(by_rank_b)}. Give one rank of "
            "each."
        )
    for label, missing in (("A", by_rank_b.keys() - by_rank_a), ("B", by_rank_a.keys() - by_rank_b)):
        if missing:
            lacking[label] = sorted(missing)
    return [[Side("A", a), Side("B", by_rank_b[rank])] for rank, a in by_rank_a.items() if rank in by_rank_b]


def _mode_of(dumps: Sequence[RankDump]) -> CompareMode:
    """Return the first of `MODES` for which all dumps hold enough, as far as their first entries show."""
    if all(dump.task == "tensor" for dump in dumps):
        return "tensor"
    first = ([member.text for member in islice(dump.entry_texts(), _FIRST_ENTRIES)] for dump in dumps)
    return "md5" if all(any(map(_CHECKSUM.search, texts)) for texts in first) else "statistics"


def _find_differences(sides: Sequence[Side]) -> list[str]:
    """Return what the sides should have in common and have not: their entries may have no counterparts."""
    return [
        f"{sides[0].label} is of {what} {first}, {side.label} of {what} {second}"
        for side in sides[1:]
        for what in ("level", "step")
        if len({first := getattr(sides[0].dump, what), second := getattr(side.dump, what)} - {None, ""}) == 2
    ]


# -- which entries and values ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairedEntry:
    """An entry that sides should have in common: its NAMEs on those that have it, and its values on all of them."""

    names: dict[str, str]
    values: Mapping[str, LeavesByName]


def pair_entries(
    sides: Sequence[Side],
    keys: Sequence[Mapping[str, Hashable]],
    is_wanted: Callable[[EntryText], bool] = lambda member: True,
) -> Iterator[tuple[Any, dict[str, DumpEntry]]]:
    """Yield all keys with the entries of the sides that have them: in the first side's order, then the next one's.

    Only names and positions are kept of the other sides, so that dumps may be larger than memory.

    Args:
        keys: for each side, NAME -> key of what other sides may call by another NAME; otherwise the NAME is the key.
    """
    indexes: list[dict[Hashable, tuple[str, int, int]]] = [{} for _ in sides]
    for side, renamed, index in zip(sides[1:], keys[1:], indexes[1:], strict=True):
        for member in filter(is_wanted, side.dump.entry_texts()):
            index[renamed.get(member.key, member.key)] = member.key, member.offset, member.size
    for number, side in enumerate(sides):
        left = (side.dump.reread(*where) for where in indexes[number].values())
        for member in left if number else filter(is_wanted, side.dump.entry_texts()):
            key = keys[number].get(member.key, member.key)
            entries = {side.label: side.dump.parse(member)}
            for later, index in zip(sides[number + 1 :], indexes[number + 1 :], strict=True):
                if (where := index.pop(key, None)) is not None:
                    entries[later.label] = later.dump.parse(later.dump.reread(*where))
            yield key, entries


def entries_of_runs(sides: Sequence[Side], left_out: dict[str, int]) -> Iterator[PairedEntry]:
    """Yield all entries of two runs, with the names and paths on which the tools that wrote them agree.

    What cannot be compared is counted in ``left_out``.
    """
    ours = [msprobe.VERSION in side.dump.header for side in sides]
    names = ([member.key for member in side.dump.entry_texts()] for side in sides)
    keys: Sequence[Mapping[str, Hashable]] = ({}, {}) if all(ours) else msprobe.common_names(*names)
    for _, entries in pair_entries(sides, keys):
        is_on_all_sides = len(entries) == len(sides)
        if is_on_all_sides and _lack_tensors(entries, left_out):
            continue
        values = {side.label: _values(entries.get(side.label), ours[0] != ours[1]) for side in sides}
        if is_on_all_sides and all(entry.name.startswith(msprobe.COLLECTIVE) for entry in entries.values()):
            values = _select_arguments(values)
        yield PairedEntry({label: entry.name for label, entry in entries.items()}, values)


def _lack_tensors(entries: Mapping[str, DumpEntry], left_out: dict[str, int]) -> bool:
    is_dropped = any(entry.is_dropped for entry in entries.values())
    if is_dropped:
        tally(left_out, "entries of which a dump has no tensors, for async_max_bytes was too small")
    return is_dropped


def _select_arguments(values: Mapping[str, LeavesByName]) -> dict[str, LeavesByName]:
    """Return a collective's values without its number, and without arguments that older dumps do not have."""
    shared = set.intersection(*map(set, values.values())) - {"input_kwargs.seq"}
    return {
        label: {path: leaf for path, leaf in leaves.items() if path in shared or not path.startswith("input_kwargs.")}
        for label, leaves in values.items()
    }


def _values(entry: DumpEntry | None, of_two_tools: bool) -> LeavesByName:
    if entry is None:
        return {}
    return msprobe.common_values(entry) if of_two_tools else dict(entry.values(nulls=True))


def entries_of_ranks(sides: Sequence[Side], left_out: dict[str, int]) -> Iterator[PairedEntry]:
    """Yield what should be equal: parameters, on the ranks that have them, and results of collectives in their group.

    What cannot be compared is counted in ``left_out``.
    """
    keys = [_collective_keys(side) for side in sides]
    collectives = {name for names in keys for name in names}
    labels = {rank_of(side.dump): side.label for side in sides}
    for key, entries in pair_entries(
        sides, keys, lambda member: member.key in collectives or '"parameters"' in member.text
    ):
        if _lack_tensors(entries, left_out):
            continue
        if isinstance(key, str):
            values = {
                label: {path: leaf for path, leaf in entry.leaves() if path.startswith("parameters.")}
                for label, entry in entries.items()
            }
            if any(values.values()) and len(values) < len(sides):
                tally(left_out, "entries with parameters, on the ranks that lack them")
        else:
            made = {label: dict(msprobe.read_collective(entry, 0).outputs) for label, entry in entries.items()}
            values = {labels[rank]: made.get(labels[rank], {}) for rank in key[1] or labels if rank in labels}
            if len(values) < 2 or not values.keys() & made or not all(made.values()):
                tally(left_out, "collectives of which no other rank is compared, or some rank has no output")
                continue
        if len(values) < 2 or not any(values.values()):
            continue
        for path in {path for leaves in values.values() for path, leaf in leaves.items() if _is_sharded(leaf)}:
            tally(left_out, "sharded tensors, of which each rank holds another part")
            for leaves in values.values():
                leaves.pop(path, None)
        yield PairedEntry({label: entry.name for label, entry in entries.items() if label in values}, values)


def _collective_keys(side: Side) -> dict[str, Hashable]:
    """Return NAME -> kind, ranks, group and number of the collectives whose results are equal on all their ranks.

    Their number is that in the group, which our dumps have; otherwise they are counted as they began.
    """
    members = [member for member in side.dump.entry_texts() if member.key.startswith(msprobe.COLLECTIVE)]
    calls = [msprobe.read_collective(entry, 0) for entry in map(side.dump.parse, members)]
    counts: dict[Hashable, int] = {}
    keys: dict[str, Hashable] = {}
    for call in sorted(calls, key=lambda call: call.number):
        if call.operator.has_equal_results:
            kind = call.api, tuple(sorted(call.ranks)), call.group
            keys[call.name] = (*kind, counts.get(kind, 0) if call.sequence is None else call.sequence)
            tally(counts, kind)
    return keys


def _is_sharded(leaf: DumpLeaf) -> bool:
    """Return whether its numbers are those of a part of a DTensor."""
    placements = leaf.raw.get("placements")
    return isinstance(placements, list) and any(placement not in msprobe.REPLICATED for placement in placements)


def entries_of_names(sides: Sequence[Side], names: Sequence[str]) -> Iterator[PairedEntry]:
    """Yield the tensors that ``--tensor`` names. Raises `DumpError` for one that is not there."""
    if len(names) > 2:
        raise DumpError("--tensor takes one name, of a tensor in A and B, or two: A's and B's (without B: both of A).")
    full = dict(zip((side.label for side in sides), (names[0], names[-1]), strict=True))
    yield PairedEntry(full, {side.label: {"": _find_leaf(side.dump, full[side.label])} for side in sides})


def _find_leaf(dump: RankDump, name: str) -> DumpLeaf:
    near: list[str] = []
    for member in dump.entry_texts():
        if name.startswith(f"{member.key}."):
            leaves = {f"{member.key}.{path}": leaf for path, leaf in dump.parse(member).leaves()}
            if name in leaves:
                return leaves[name]
            near += leaves
    known = f"It has {shorten(near, 8)}" if near else "A name is that of an entry and of a tensor in it"
    raise DumpError(
        f"{dump.path} has no tensor {name}. {known}, like Functional.linear.0.forward.output.0.", path=str(dump.path)
    )


# -- when a value differs ----------------------------------------------------------------------------------------------

_PLAIN = ("int", "float", "bool", "str", "complex", "None", "slice", "ellipsis", "torch.dtype", "torch.Size")
_SECTIONS = {"input": 0, "input_kwargs": 1, "parameters": 2, "output": 4}  # the order in a call; 3 for others


@dataclass(frozen=True)
class Comparer:
    """Compares values by msprobe's rules.

    Attributes:
        mode: what is compared at most: elements, checksums or statistics.
        tolerance: a relative error above it is a ``Warning``.
    """

    mode: CompareMode
    tolerance: float = msprobe.TOLERANCE

    def compare(
        self, sides: Sequence[Side], entries: Iterable[PairedEntry], comparison: Comparison
    ) -> Iterator[LeafRow]:
        """Yield a row for every value of the entries, and add it to the comparison."""
        by_label = {side.label: side for side in sides}
        for shared in entries:
            lacking = shared.values.keys() - shared.names.keys()
            comparison.entries += not lacking
            for label in lacking:
                tally(comparison.lacking, label)
            dump, name = next((by_label[label].dump, name) for label, name in shared.names.items())
            for row in self.rows(by_label, shared):
                row.parent, row.stack = dump.parent_of(name), dump.stack_of(name)
                comparison.add(row)
                yield row

    def rows(self, sides: Mapping[str, Side], shared: PairedEntry) -> list[LeafRow]:
        """Return a row for every value, or for an entry that a side lacks; outputs are behind what they follow from."""
        paths = [path for leaves in shared.values.values() for path, leaf in leaves.items() if _is_compared(leaf)]
        if len(shared.names) < len(shared.values):
            paths = [""]
        ordered = sorted(dict.fromkeys(paths), key=lambda path: _SECTIONS.get(path.partition(".")[0], 3))
        rows = [self._row(sides, shared, path) for path in ordered]
        inputs = [row.max_error for row in rows if row.path.startswith("input") and row.max_error is not None]
        for row in rows:
            if row.path.startswith("output") and msprobe.error_grows(inputs, row.max_error):
                row.highlight = row.highlight or msprobe.GROWTH
        return rows

    def _row(self, sides: Mapping[str, Side], shared: PairedEntry, path: str) -> LeafRow:
        leaves = {label: values.get(path) for label, values in shared.values.items()}
        groups: dict[str, list[str]] = {}  # by the side that the others are compared with

        def verdict_on(label: str, reference: str) -> LeafVerdict:
            return self._verdict(sides[label], leaves[label], sides[reference], leaves[reference], shared.names)

        verdicts = {}
        for label in reversed(leaves):
            for reference, group in groups.items():
                verdicts[label, reference] = verdict_on(label, reference)
                if not verdicts[label, reference].unequal:
                    group.insert(0, label)
                    break
            else:
                groups[label] = [label]
        reference = max(groups, key=lambda label: len(groups[label]))
        others = [label for label in leaves if label not in groups[reference]]
        side = (others or groups[reference])[0]
        known = [leaf for leaf in leaves.values() if others and leaf is not None and leaf.is_tensor]
        return LeafRow(
            path,
            shared.names,
            {label: None if leaf is None else leaf.raw for label, leaf in leaves.items()},
            (side, reference),
            [*groups.values()][::-1],
            others if 2 * len(groups[reference]) > len(leaves) else [],
            verdicts.get((side, reference)) or verdict_on(side, reference),
            NONFINITE if len({leaf.is_finite for leaf in known}) == 2 else "",
        )

    def _verdict(
        self, a: Side, leaf_a: DumpLeaf | None, b: Side, leaf_b: DumpLeaf | None, names: Mapping[str, str]
    ) -> LeafVerdict:
        """Decide whether two values are equal: the only function that does."""
        absent = {side.label for side in (a, b)} - names.keys()
        if len(absent) == 1:
            return _leave_uncompared(f"{absent.pop()} lacks this entry")
        if leaf_a is None or leaf_b is None:
            if leaf_a is leaf_b:
                return LeafVerdict("", "", False)
            label, leaf = (a.label, leaf_b) if leaf_a is None else (b.label, leaf_a)
            return _leave_uncompared(f"{label} lacks this {'tensor' if leaf and leaf.is_tensor else 'argument'}")
        if leaf_a.is_tensor != leaf_b.is_tensor:
            return _leave_uncompared(f"a {leaf_a.type} in {a.label} and a {leaf_b.type} in {b.label}")
        if not leaf_a.is_tensor:
            return self._verdict_on_plain(a, leaf_a, b, leaf_b)
        shape_a, shape_b = (leaf.raw.get("local_shape") or list(leaf.shape) for leaf in (leaf_a, leaf_b))
        if shape_a != shape_b:
            return _leave_uncompared(f"the shape is {shape_a} in {a.label} and {shape_b} in {b.label}")
        errors = {
            row.key: msprobe.difference(row.read(leaf_a.raw.get(row.key)), row.read(leaf_b.raw.get(row.key)))
            for row in statistics.STATISTICS
            if row.compared == "relative"
        }
        closeness, fields, messages = None, ["dtype", "requires_grad", "layout", "nnz"], []
        if self.mode == "tensor" and leaf_a.data_name is not None and leaf_b.data_name is not None:
            from ddpstats.dump.analyze.tensors import compare_saved  # only this needs torch

            closeness = compare_saved(a.dump, leaf_a, b.dump, leaf_b)
            compared, unequal = "elements", not closeness.equal
            result = "Yes" if closeness.accurate else "No"
            messages = [closeness.runs.words] * unequal
        elif self.mode != "statistics" and leaf_a.md5 is not None and leaf_b.md5 is not None:
            compared, unequal = "checksum", leaf_a.md5 != leaf_b.md5
            result = "Different" if unequal else "Pass"
        elif leaf_a.has_numbers != leaf_b.has_numbers:
            return _leave_uncompared(f"{(b if leaf_a.has_numbers else a).label} has no statistics of it")
        else:
            compared, unequal = "statistics", any(error[0] for error in errors.values())
            over = [key for key, error in errors.items() if self._is_over(error)]
            result = "Warning" if over else ""
            if over == ["Mean"] and _has_mean_near_zero(leaf_a) and _has_mean_near_zero(leaf_b):
                messages = ["only the mean, which is near 0"]
            fields += statistics.statistic_keys("equal")
        for key in fields:
            in_a, in_b = leaf_a.raw.get(key), leaf_b.raw.get(key)
            if in_a != in_b and in_a is not None and in_b is not None:
                messages.append(f"{key} is {in_a} in {a.label} and {in_b} in {b.label}")
                unequal = True
        if not unequal and compared != "elements":
            if not (compared == "checksum" or leaf_a.has_numbers):
                return LeafVerdict("", "", False, "tensors of which the dumps have no numbers")
            if "sparse" in str(leaf_a.raw.get("layout")):
                return LeafVerdict("", "", False, "sparse tensors with equal values, of which no dump has the indices")
        return LeafVerdict(result, compared, unequal, "; ".join(messages), errors, closeness)

    def _verdict_on_plain(self, a: Side, leaf_a: DumpLeaf, b: Side, leaf_b: DumpLeaf) -> LeafVerdict:
        if leaf_a.type == leaf_b.type and ("value" in leaf_a.raw) != ("value" in leaf_b.raw):
            return LeafVerdict("", "", False, "values that one dump does not have")
        kinds = {_kind(leaf_a), _kind(leaf_b)}
        error: msprobe.StatisticDifference = (None, None)
        if kinds in ({"float"}, {"float", "int"}):
            with contextlib.suppress(ValueError):
                error = msprobe.difference(statistics.read_number(leaf_a.value), statistics.read_number(leaf_b.value))
        if error[1] is not None:
            unequal, failed = bool(error[0]), self._is_over(error)
        else:
            unequal = failed = leaf_a.value != leaf_b.value or len(kinds) > 1
        values = [repr(leaf.value) if _kind(leaf) in _PLAIN else f"a {leaf.type}" for leaf in (leaf_a, leaf_b)]
        message = f"{values[0]} in {a.label} and {values[1]} in {b.label}" if unequal else ""
        return LeafVerdict("Warning" if failed else "", "value", unequal, message)

    def _is_over(self, error: msprobe.StatisticDifference) -> bool:
        """Return whether the relative error is over the tolerance; a NaN is over each."""
        return error[1] is not None and not error[1] <= self.tolerance


def _has_mean_near_zero(leaf: DumpLeaf) -> bool:
    """Return whether the mean is small against the extremes: then rounding alone changes it by much."""
    mean, high, low = (abs(statistics.read_number(leaf.raw.get(key)) or 0) for key in ("Mean", "Max", "Min"))
    return mean <= 0.01 * max(high, low)


def _leave_uncompared(message: str) -> LeafVerdict:
    """Return the verdict on what cannot be compared."""
    return LeafVerdict("N/A", "", True, message)


def _is_compared(leaf: DumpLeaf) -> bool:
    """Return whether it is compared: names of devices and what the dump has no value of are not."""
    return leaf.is_tensor or _kind(leaf) in _PLAIN


def _kind(leaf: DumpLeaf) -> str:
    """Return the type by which a value is compared: Python's, where the value is of numpy or an enum."""
    if leaf.type in _PLAIN or leaf.type.startswith("torch."):
        return leaf.type
    of_numpy = next((kind for kind in ("complex", "float") if leaf.type.startswith(kind)), None)  # may be text in JSON
    return of_numpy or type(leaf.value).__name__


def tally(counts: dict[Any, int], key: Hashable) -> None:
    counts[key] = counts.get(key, 0) + 1
