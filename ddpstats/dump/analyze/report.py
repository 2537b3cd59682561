"""A comparison as text, as a table (CSV, with msprobe's columns) and as a page (HTML).

Names may come from untrusted files: what reaches a terminal, a spreadsheet program or a browser is made harmless.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ddpstats._base.text import count_of, printable, ranks_text, shorten, write_file
from ddpstats.dump.analyze import DumpLeaf
from ddpstats.dump.analyze.compare import (
    NONFINITE,
    NOTHING_COMPARED,
    CompareFindings,
    CompareMode,
    Comparison,
    LeafRow,
)
from ddpstats.dump.msprobe import GROWTH, columns
from ddpstats.dump.statistics import statistic_keys

_SHOWN_ROWS = 20
_SHOWN_SIDES = 8
_EQUAL = {
    "elements": "element by element",
    "checksum": "in their checksums",
    "statistics": "in all their statistics (which does not prove equal tensors)",
}


def as_text(findings: CompareFindings) -> str:
    """Return the verdict, the first differences of each comparison, and what to do next."""
    lines = [_verdict(findings)]
    lines += [f"{side} lacks {ranks_text(ranks)}." for side, ranks in findings.lacking.items()]
    for comparison in findings.comparisons:
        lines += ["", *_comparison_lines(comparison)]
    if findings.status == 1 and findings.mode != "tensor":
        lines += ["", "Next: dump the first entry that differs with task tensor, to see which elements differ."]
    return printable([*lines, *(f"note: {note}" for note in findings.notes)])


def _verdict(findings: CompareFindings) -> str:
    compared = sum((Counter(each.compared) for each in findings.comparisons), Counter[str]())
    ranks = count_of(sum(len(each.ranks) for each in findings.comparisons), "ranks")
    what = f"{count_of(compared.total(), 'tensors')} in {ranks}"
    if findings.status == NOTHING_COMPARED:
        return f"NOTHING TO COMPARE: no tensor with numbers is on all sides, in {ranks}."
    if not findings.total("unequal") and not findings.lacking:
        how = ", ".join(f"{number:,} equal {_EQUAL[kind]}" for kind, number in compared.items())
        return f"NOTHING DIFFERENT: {what}: {how}."
    over = {"tensor": "not accurate", "md5": "different", "statistics": f"over the tolerance {findings.tolerance:g}"}
    failed, unequal = findings.total("failed_tensors"), findings.total("unequal_tensors")
    failing = "" if findings.exact else f" {failed:,} are {over[findings.mode]},"
    others = findings.total("unequal") - unequal
    beside = f" Other values that differ or have no counterpart: {others:,}." if others else ""
    head = "DIFFERENT" if findings.status else "NOTHING DIFFERENT by the rule"
    return f"{head}: of {what},{failing} {unequal:,} differ at all.{beside}"


def _comparison_lines(comparison: Comparison) -> Iterator[str]:
    lacking = [f"{count_of(number, 'entries')} not in {side}" for side, number in comparison.lacking.items()]
    counts = [count_of(comparison.entries, "entries on all sides"), *lacking]
    yield f"{ranks_text(comparison.ranks)}: {', '.join(counts)}"
    for side, path in comparison.sides.items():
        yield f"  {side} {path}" + "  incomplete: the run ended inside this step" * (side in comparison.incomplete)
    yield from (f"  not compared: {number:,} {what}" for what, number in comparison.left_out.items())
    rows = comparison.rows
    failed = next((row for row in rows if row.verdict.failed), None)
    if rows:
        yield "  first that differs:"
        yield from _details(rows[0])
    if failed is not None and failed is not rows[0]:
        yield "  first over the tolerance or not comparable:"
        yield from _details(failed)
    if len(rows) > 1:
        listed = ([row for row in rows if row.verdict.failed] or rows)[:_SHOWN_ROWS]
        yield f"  {len(listed)} of {comparison.failed or comparison.unequal:,} in execution order:"
        yield from _align([[row.verdict.result or "unequal", row.name(), _reason(row)] for row in listed])
    splits = Counter(_split(row) for row in rows if "A" not in row.leaves and not row.culprits)
    for split, number in splits.most_common(1):
        yield f"  No majority in {number:,} of {count_of(len(rows), 'rows')}: {split}. Under tensor or pipeline"
        yield "  parallelism ranks differ by right: compare those that hold the same parameters, with --ranks."


def _details(row: LeafRow) -> Iterator[str]:
    raws = {side: raw or {} for side, raw in [*row.leaves.items()][:_SHOWN_SIDES]}
    leaf = DumpLeaf(next(filter(None, raws.values()), {}))
    kind = f"  {leaf.dtype} {list(leaf.shape)}" if leaf.is_tensor else ""
    yield f"    {row.entry}  {row.path}{kind}".rstrip()
    yield from (f"      {side} {name}" for side, name in row.names.items() if name != row.entry)
    yield f"      {_reason(row)}"
    if leaf.is_tensor:
        known = {key for raw in raws.values() for key, value in raw.items() if value is not None}
        keys = [key for key in (*statistic_keys("relative"), "md5") if key in known]
        errors = [row.verdict.errors.get(key, (None, None))[1] for key in keys]
        table = [["", *keys, ""]]
        for side, raw in raws.items():
            table.append([side, *(str(raw.get(key, "")) for key in keys), _memory(DumpLeaf(raw))])
        table += [["relative", *("" if error is None else f"{error:.4g}" for error in errors), ""]] * any(errors)
        yield from _align(table, indent=6)
    if (close := row.verdict.closeness) is not None:
        yield f"      cosine {close.cosine:.9g}, largest absolute difference {close.max_abs:.6g}"
    if row.parent:
        yield f"      inside {row.parent if isinstance(row.parent, str) else ', '.join(row.parent)}"
    yield from ("      " + " ".join(line.split()) for line in row.stack[:3])


def _memory(leaf: DumpLeaf) -> str:
    if leaf.data_ptr is None:
        return ""
    return f"at 0x{leaf.data_ptr:x} in storage {leaf.storage_id} of {leaf.storage_bytes or 0:,} bytes"


def _reason(row: LeafRow) -> str:
    """Return which sides differ, and how."""
    who = ""
    if row.culprits:
        who = f"{shorten(row.culprits, 8)} differ{'s' * (len(row.culprits) == 1)} from the majority"
    elif row.verdict.unequal and "A" not in row.leaves:
        who = f"no majority: {_split(row)}"
    errors = row.verdict.errors if row.verdict.compared == "statistics" else {}
    relative = ", ".join(f"{key} {error[1]:.4g}" for key, error in errors.items() if error[1])
    return "; ".join(filter(None, (who, row.verdict.message, relative and f"relative error {relative}", row.highlight)))


def _split(row: LeafRow) -> str:
    return " | ".join(shorten(group, 8) for group in row.groups)


def _align(rows: Sequence[Sequence[str]], indent: int = 4) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield " " * indent + "  ".join(map(str.ljust, row, widths)).rstrip()


# -- tables and pages --------------------------------------------------------------------------------------------------

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_STYLE = """
body { font: 14px/1.4 sans-serif; margin: 1.5em; color: #222; }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto; }
table { border-collapse: collapse; font-size: 12px; }
th, td { border: 1px solid #ccc; padding: 2px 6px; text-align: left; vertical-align: top; white-space: pre-wrap; }
th { background: #eee; position: sticky; top: 0; }
tr.red { background: #ffd6d6; }
tr.yellow { background: #fff3bf; }
"""


def cells(row: LeafRow, mode: CompareMode) -> list[Any]:
    """Return a row's values in the order of `msprobe.columns`; ``N/A`` where there is nothing."""
    numbers, close = statistic_keys("relative"), row.verdict.closeness
    raws = [row.leaves[side] for side in row.sides]
    grads = [None if raw is None else raw.get("requires_grad") for raw in raws]
    errors = [row.verdict.errors.get(key, (None, None)) for key in numbers]
    middle: dict[CompareMode, list[Any]] = {
        "statistics": [*(error[0] for error in errors), *(_percent(error[1]) for error in errors)],
        "md5": [raw and raw.get("md5") for raw in raws],
        "tensor": [None] * 6 if close is None else [*vars(close).values()][:6],
    }
    known = [
        *(
            None if side not in row.names or (row.path and raw is None) else row.name(side)
            for side, raw in zip(row.sides, raws, strict=True)
        ),
        *(None if raw is None else DumpLeaf(raw).dtype for raw in raws),
        *(None if raw is None else str(raw.get("shape", [])) for raw in raws),
        *(None if grad is None else str(grad) for grad in grads),
        *middle[mode],
        *(raw and raw.get(key, raw.get("value")) for raw in raws for key in numbers if mode != "md5"),
        None if None in grads else str(grads[0] == grads[1]),
        *(row.verdict.result, _reason(row), "\n".join(row.stack) or None),
    ]
    return ["N/A" if cell is None else cell for cell in known]


def _percent(error: float | None) -> str | None:
    return None if error is None else f"{error * 100:.6g}%" if math.isfinite(error) else str(error)


def write_table(path: Path, rows: Iterable[LeafRow], mode: CompareMode) -> None:
    """Write a CSV file. No cell can begin a formula in a spreadsheet program."""
    lines = (map(escape_formula, line) for line in itertools.chain([columns(mode)], (cells(row, mode) for row in rows)))
    write_file(path, lambda file: csv.writer(file).writerows(lines))


def escape_formula(cell: Any) -> Any:
    """Return a cell of a table that cannot begin a formula; numbers stay as they are."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def write_page(path: Path, findings: CompareFindings, text: str) -> None:
    """Write a page of the text, and for each comparison a table of its rows. It needs nothing from anywhere."""
    write_file(path, lambda file: file.writelines(_page(findings, text)))


def _page(findings: CompareFindings, text: str) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<title>ddpstats compare</title><style>{_STYLE}</style></head><body>\n<pre>{escape(text)}</pre>\n"
    for comparison in findings.comparisons:
        yield f"<h2>{escape(ranks_text(comparison.ranks))}</h2>\n<table><tr>"
        yield "".join(f"<th>{escape(name)}</th>" for name in columns(findings.mode)) + "</tr>\n"
        for row in comparison.rows:
            color = {NONFINITE: "red", GROWTH: "yellow"}.get(row.highlight, "")
            texts = (f"{cell:.9g}" if isinstance(cell, float) else str(cell) for cell in cells(row, findings.mode))
            yield f'<tr class="{color}">' + "".join(f"<td>{escape(text)}</td>" for text in texts) + "</tr>\n"
        yield "</table>\n"
    yield "</body></html>\n"
