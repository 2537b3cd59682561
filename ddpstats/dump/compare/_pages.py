"""What a comparison is written to: a table (CSV) and a page (HTML).

Names in them may come from untrusted files, so whatever reaches a spreadsheet program or a browser is made harmless.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ddpstats._base.text import write_file

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")

# The page needs nothing more: no script, no font, no picture from anywhere.
_STYLE = """
body { font: 14px/1.4 sans-serif; margin: 1.5em; color: #222; }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto; }
table { border-collapse: collapse; font-size: 12px; }
th, td { border: 1px solid #ccc; padding: 2px 6px; text-align: left; vertical-align: top; white-space: pre-wrap; }
th { background: #eee; position: sticky; top: 0; }
tr.red { background: #ffd6d6; }
tr.yellow { background: #fff3bf; }
"""


@dataclass(frozen=True)
class Section:
    """A table of a page, below a heading and remarks.

    Attributes:
        header: empty where there are no rows to show.
        rows: for each, its cells, a color ("red", "yellow" or ""), and the reason for the color.
    """

    header: Sequence[str]
    rows: Iterable[tuple[Sequence[Any], str, str]]
    heading: str = ""
    remarks: Sequence[str] = ()


def write_page(path: Path, title: str, text: str, sections: Iterable[Section]) -> None:
    """Write a page of the text and the sections."""
    write_file(path, lambda file: file.writelines(_page(title, text, sections)))


def write_table(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file, the header first. No cell can begin a formula in a spreadsheet program."""
    write_file(path, lambda file: csv.writer(file).writerows(map(escape_formula, row) for row in rows))


def escape_formula(cell: Any) -> Any:
    """Return a cell of a table that cannot begin a formula; numbers stay as they are."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def _page(title: str, text: str, sections: Iterable[Section]) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
    yield f"<h1>{escape(title)}</h1>\n<pre>{escape(text)}</pre>\n"
    for section in sections:
        yield f"<h2>{escape(section.heading)}</h2>\n" if section.heading else ""
        yield from (f"<p>{escape(remark)}</p>\n" for remark in section.remarks)
        yield from _rows(section) if section.header else ()
    yield "</body></html>\n"


def _rows(section: Section) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th>{escape(name)}</th>" for name in section.header) + "</tr>\n"
    for row, color, reason in section.rows:
        yield f'<tr class="{color}" title="{escape(reason)}">' if color else "<tr>"
        texts = (f"{cell:.9g}" if isinstance(cell, float) else str(cell) for cell in row)
        yield "".join(f"<td>{escape(text)}</td>" for text in texts) + "</tr>\n"
    yield "</table>\n"
