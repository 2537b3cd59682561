"""A comparison as one HTML page that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, TextIO

from ddpstats.dump.compare._columns import cells, columns
from ddpstats.dump.compare._comparison import Comparison, RankComparison

_STYLE = """
body { font: 14px/1.4 sans-serif; margin: 1.5em; color: #222; }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto; }
table { border-collapse: collapse; font-size: 12px; }
th, td { border: 1px solid #ccc; padding: 2px 6px; text-align: left; vertical-align: top; white-space: pre-wrap; }
th { background: #eee; position: sticky; top: 0; }
tr.red { background: #ffd6d6; }
tr.yellow { background: #fff3bf; }
"""


def write_page(file: TextIO, title: str, text: str, comparison: Comparison) -> None:
    """The text of the report, then a table per rank with the rows that differ, in execution order."""
    file.writelines(_head(title, text))
    for compared in comparison.ranks:
        file.writelines(_section(compared, comparison))
    file.write("</body></html>\n")


def write_table_page(file: TextIO, title: str, text: str, rows: Iterator[list[Any]]) -> None:
    """The same for a plain table, its header first."""
    file.writelines(_head(title, text))
    file.writelines(_table(next(rows), ((row, "", "") for row in rows)))
    file.write("</body></html>\n")


def _head(title: str, text: str) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
    yield f"<h1>{escape(title)}</h1>\n<pre>{escape(text)}</pre>\n"


def _section(compared: RankComparison, comparison: Comparison) -> Iterator[str]:
    found = compared.found
    rows = found.rows
    yield f"<h2>{'one process' if compared.a.rank is None else f'rank {compared.a.rank}'}</h2>\n"
    if found.highlighted > len(rows):
        yield f"<p>{len(rows):,} of {found.highlighted:,} rows that differ or stand out: the first that fail, and the "
        yield "first others; --csv has all.</p>\n"
    if not rows:
        yield "<p>No row differs.</p>\n"
        return
    mode = comparison.mode
    stacks = (compared.b if row.only == "B" else compared.a for row in rows)
    shown = (
        ([*cells(row, mode, dump.stack_of(row.entry)), row.reason], row.color or "", row.reason)
        for row, dump in zip(rows, stacks, strict=True)
    )
    yield from _table([*columns(mode), "Highlighted because"], shown)


def _table(header: Sequence[str], rows: Iterator[tuple[list[Any], str, str]]) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th>{escape(name)}</th>" for name in header) + "</tr>\n"
    for row, color, reason in rows:
        yield f'<tr class="{color}" title="{escape(reason)}">' if color else "<tr>"
        yield "".join(f"<td>{escape(_cell(cell))}</td>" for cell in row) + "</tr>\n"
    yield "</table>\n"


def _cell(cell: Any) -> str:
    return f"{cell:.9g}" if isinstance(cell, float) else str(cell)
