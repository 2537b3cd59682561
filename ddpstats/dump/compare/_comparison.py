"""What was compared and what was found, for text, JSON and HTML alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpstats._base.text import count_of, printable, ranks_text
from ddpstats.dump.compare._pages import Section
from ddpstats.dump.compare._rows import Mode, Row, as_dict, cells, columns
from ddpstats.dump.compare._two_dumps import PairedDumps
from ddpstats.dump.reader import STATISTICS, RankDump, notes_of

_SHOWN_ROWS = 20
_SHOWN_COLORED = 5
_JSON_ROWS = 1000
_SHOWN_RANKS = 10
_ENDED_EARLY = "it ended before its first entry, or was not copied"


@dataclass(frozen=True)
class RankComparison:
    """Two ranks of one number."""

    a: RankDump
    b: RankDump
    found: PairedDumps

    def dump_of(self, row: Row) -> RankDump:
        """The one that has the row's entry: A, if both have."""
        return self.b if row.only == "B" else self.a


@dataclass(frozen=True)
class DumpComparison:
    """Two runs.

    Attributes:
        ranks: those that both have.
        only_a: ranks that A has and B has not; `only_b` the other way round.
        without_dump: directories of ranks in which there is no dump.
        exact: whether any inequality counts, or those over the tolerance.
    """

    mode: Mode
    tolerance: float
    exact: bool
    ranks: tuple[RankComparison, ...]
    only_a: tuple[int, ...] = ()
    only_b: tuple[int, ...] = ()
    without_dump: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        counts = [rank.found.unequal if self.exact else rank.found.failed for rank in self.ranks]
        return any(counts) or bool(self.only_a or self.only_b)

    @property
    def nothing(self) -> bool:
        """Whether there was nothing to compare."""
        return not self.differs and not any(rank.found.tensors or rank.found.unequal for rank in self.ranks)

    def total(self, of: str) -> int:
        """A number of `PairedDumps`, of all ranks together."""
        return sum(getattr(rank.found, of) for rank in self.ranks)

    @property
    def verdict(self) -> str:
        return "nothing to compare" if self.nothing else "different" if self.differs else "nothing different"


def as_json(comparison: DumpComparison) -> dict[str, Any]:
    return {
        "verdict": comparison.verdict,
        "mode": comparison.mode,
        "tolerance": comparison.tolerance,
        "exact": comparison.exact,
        "only_a_ranks": comparison.only_a,
        "only_b_ranks": comparison.only_b,
        "ranks_without_dump": comparison.without_dump,
        "ranks": [_rank_json(rank, comparison.mode) for rank in comparison.ranks],
    }


def _rank_json(compared: RankComparison, mode: Mode) -> dict[str, Any]:
    found = compared.found
    return {
        "rank": compared.a.rank,
        "step": compared.a.step,
        "a": str(compared.a.path),
        "b": str(compared.b.path),
        "incomplete": [side for side, dump in (("A", compared.a), ("B", compared.b)) if not dump.complete],
        "notes": notes_of((compared.a, compared.b)),
        "paired": found.paired,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "compared": found.tensors,
        "compared_by_statistics": found.by_statistics if mode == "tensor" else found.tensors * (mode == "statistics"),
        "unequal": found.unequal,
        "over_tolerance_or_not_comparable": found.failed,
        "unequal_tensors": found.unequal_tensors,
        "over_tolerance_or_not_comparable_tensors": found.failed_tensors,
        "first_unequal": _first_json(compared, found.first_unequal),
        "first_over_tolerance": _first_json(compared, found.first_failed),
        "rows_total": found.highlighted,
        "rows": [as_dict(row) for row in found.rows[:_JSON_ROWS]],
    }


def _first_json(compared: RankComparison, row: Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    dump = compared.dump_of(row)
    return as_dict(row, dump.stack_of(row.entry), dump.parent_of(row.entry))


def as_text(comparison: DumpComparison) -> str:
    """For people: the verdict, the first difference of each rank, and what to do."""
    lines = [_verdict(comparison)]
    for side, other, ranks in (("A", "B", comparison.only_a), ("B", "A", comparison.only_b)):
        if ranks:
            lines.append(f"Only {side} has {ranks_text(ranks)}: {other} has no such rank.")
    lines += [f"{name} has no dump: {_ENDED_EARLY}." for name in comparison.without_dump[:_SHOWN_RANKS]]
    for compared in comparison.ranks:
        lines += ["", *_rank_lines(comparison, compared)]
    if comparison.differs or any(rank.found.unequal for rank in comparison.ranks):
        lines += ["", *_next(comparison)]
    for compared in comparison.ranks:
        lines += [f"note: {note}" for note in notes_of((compared.a, compared.b))]
    return printable(lines)


def _verdict(comparison: DumpComparison) -> str:
    over = {"statistics": f"over the tolerance {comparison.tolerance:g}", "md5": "different", "tensor": "not accurate"}
    failed = comparison.total("failed_tensors")
    unequal = comparison.total("unequal_tensors")
    others = comparison.total("unequal") - unequal
    count = comparison.total("tensors")
    what = f"{count_of(count, 'tensors')} in {count_of(len(comparison.ranks), 'ranks')}"
    if comparison.nothing:
        return f"NOTHING TO COMPARE: there are no tensors in both dumps ({what})."
    if not (unequal or others) and not comparison.differs:
        return f"NOTHING DIFFERENT: {what} are {_equal(comparison)}."
    head = "DIFFERENT" if comparison.differs else "NOTHING DIFFERENT by the rule"
    lines = f"{head}: of {what}, {failed:,} are {over[comparison.mode]} or not comparable, {unequal:,} differ at all."
    return f"{lines} {_others(comparison, others)}" if others else lines


def _others(comparison: DumpComparison, others: int) -> str:
    """What is unequal beside the tensors that were compared with one another."""
    counts = {"A": comparison.total("only_a"), "B": comparison.total("only_b")}
    alone = [f"{count:,} only in {side}" for side, count in counts.items() if count]
    where = f" (entries: {', '.join(alone)})" if alone else ""
    return f"Beside them {others:,} values differ or have no counterpart{where}."


def _equal(comparison: DumpComparison) -> str:
    unsaved = comparison.total("by_statistics")
    if comparison.mode == "md5":
        return "equal in their checksums"
    if comparison.mode == "statistics":
        return "equal in all their statistics (which does not prove equal tensors)"
    more = f", {unsaved:,} that neither side saved in all their statistics only" if unsaved else ""
    return f"equal element by element{more}"


def _rank_lines(comparison: DumpComparison, compared: RankComparison) -> list[str]:
    found = compared.found
    where = "one process" if compared.a.rank is None else f"rank {compared.a.rank}"
    lines = [
        f"{where}: {count_of(found.paired, 'entries in both')}, {found.only_a:,} only in A, {found.only_b:,} only in B"
    ]
    for side, dump in (("A", compared.a), ("B", compared.b)):
        lines.append(
            f"  {side} {dump.path}" + ("" if dump.complete else "  incomplete: the run ended inside this step")
        )
    if found.first_unequal is not None:
        lines += ["  first that is unequal at all:", *_first(compared, found.first_unequal, comparison.mode)]
    if found.first_failed is not None:
        if found.first_failed is found.first_unequal:
            lines.append("  first over the tolerance or not comparable: the same")
        else:
            lines += ["  first over the tolerance or not comparable:"]
            lines += _first(compared, found.first_failed, comparison.mode)
    return lines + _listed(found)


def _listed(found: PairedDumps) -> list[str]:
    """The first rows that fail, else those that are unequal; and what only stands out."""
    lines = []
    rows, count = [row for row in found.rows if row.failed], found.failed
    if not rows:
        rows, count = [row for row in found.rows if row.unequal], found.unequal
    if len(rows) > 1:
        lines.append(f"  in execution order, {min(len(rows), _SHOWN_ROWS)} of {count:,}:")
        lines += [f"    {row.result or 'unequal':9} {row.name}  {_short(row)}" for row in rows[:_SHOWN_ROWS]]
    colored = [row for row in found.rows if not row.failed and not row.unequal]
    if colored:
        lines.append(f"  equal in both, and worth a look, {min(len(colored), _SHOWN_COLORED)} of {len(colored):,}:")
        lines += [f"    {row.name}  {row.reason}" for row in colored[:_SHOWN_COLORED]]
    return lines


def _first(compared: RankComparison, row: Row, mode: Mode) -> list[str]:
    leaf = row.a or row.b
    kind = f"  {leaf.dtype} {list(leaf.shape)}" if leaf is not None and leaf.is_tensor else ""
    lines = [f"    {row.entry}  {row.path}{kind}"]
    if row.message:
        lines.append(f"      {row.message}")
    return [*lines, *_values(row, mode), *(f"      {line}" for line in compared.dump_of(row).place_of(row.entry))]


def _values(row: Row, mode: Mode) -> list[str]:
    if row.a is None or row.b is None or not row.a.is_tensor:
        return []
    if mode == "md5":
        return [f"      md5 {row.a.md5} in A, {row.b.md5} in B"]
    lines = [f"      {'':5} {'A':>24} {'B':>24} {'relative':>12}"]
    for key, (_, relative) in zip(STATISTICS, row.differences, strict=True):
        given = [leaf.raw.get(key) for leaf in (row.a, row.b)]
        known = ["none" if value is None else repr(value) for value in given]
        lines.append(f"      {key:5} {known[0]:>24} {known[1]:>24} {'' if relative is None else f'{relative:12.4g}'}")
    if row.closeness is not None:
        close = row.closeness
        lines.append(f"      cosine {close.cosine:.9g}, largest absolute difference {close.max_abs:.6g}")
    return [line.rstrip() for line in lines]


def _short(row: Row) -> str:
    if row.message:
        return row.message
    over = [(key, pair[1]) for key, pair in zip(STATISTICS, row.differences, strict=True) if pair[1]]
    return "relative " + ", ".join(f"{key} {relative:.4g}" for key, relative in over)


def _next(comparison: DumpComparison) -> Sequence[str]:
    if comparison.mode == "tensor":
        return ["Next: where two tensors should be equal, compare them alone: --tensor NAME.path [NAME.path]."]
    return [
        "Next: look at the first unequal entry: its inputs and parameters were equal if it is an output. Dump it with",
        "task tensor, its name in the list, to see which elements differ, and where in memory; --csv or --html FILE",
        "have all rows.",
    ]


def page_sections(comparison: DumpComparison) -> Iterator[Section]:
    """One per rank: the rows that differ, in execution order."""
    for compared in comparison.ranks:
        found = compared.found
        heading, remarks = "one process" if compared.a.rank is None else f"rank {compared.a.rank}", []
        if found.highlighted > len(found.rows):
            remarks.append(
                f"{len(found.rows):,} of {found.highlighted:,} rows that differ or stand out: the first that fail, and "
                "the first others; --csv has all."
            )
        if not found.rows:
            yield Section((), (), heading, [*remarks, "No row differs."])
            continue
        header = [*columns(comparison.mode), "Highlighted because"]
        yield Section(header, _page_rows(compared, comparison.mode), heading, remarks)


def _page_rows(compared: RankComparison, mode: Mode) -> Iterator[tuple[list[Any], str, str]]:
    for row in compared.found.rows:
        stack = compared.dump_of(row).stack_of(row.entry)
        yield [*cells(row, mode, stack), row.reason], row.color or "", row.reason
