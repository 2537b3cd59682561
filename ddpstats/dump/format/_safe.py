"""Names in a dump are chosen by whoever wrote it: what of them may reach a terminal, and a spreadsheet program."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# control characters, separators of lines, marks that turn the writing direction round, and halves of characters
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def printable(lines: Iterable[str]) -> str:
    """Lines of a report as one text, in which nothing but their ends is a control character."""
    return "\n".join(_UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], line) for line in lines)


def harmless(cell: Any) -> Any:
    """A cell of a table that cannot begin a formula; numbers stay as they are."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
