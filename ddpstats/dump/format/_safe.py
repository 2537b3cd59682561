"""What of a dump may reach a terminal, a spreadsheet program and a JSON parser: whoever wrote it chose its names."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ddpstats.errors import DumpError

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


def strict(value: Any) -> Any:
    """Legal JSON: with words in place of the numbers that it has not."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: strict(held) for key, held in value.items()}
    return [strict(held) for held in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def sayable_errors() -> Iterator[None]:
    """For the whole of a verb that reads dumps: what cannot be read is a `DumpError` that a terminal can show."""
    try:
        yield
    except DumpError as error:  # it may quote names from a dump
        raise DumpError(printable([str(error)]), path=error.path) from None
    except BrokenPipeError:  # the reader of our output has gone, which is no fault of the dump
        raise
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        raise DumpError(f"{where}{error.strerror or error}. Check the path and its permissions.") from None
