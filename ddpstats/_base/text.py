"""Words that messages share: numbers of things, lists cut short, errors in one line, names of dtypes.

Ranks in messages: global, with the group rank in parentheses where it differs.

What a verb of the command found: as text, as one JSON object, and in files, a table (CSV) or a page (HTML).

Names in it may come from files that somebody else wrote, so what reaches a terminal, a spreadsheet program, a JSON
parser or a browser is made harmless here. A file is there complete, or not at all; where the name is that of a link, it
is the file that the link leads to. What is there and is no regular file, a pipe or a device, is written into as it is;
so is the file that stdout or stderr goes to, after what is in it.

A progress bar on stderr, where that is a terminal.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import math
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ddpstats._base.files import TEMPORARY_PREFIX, replace_file
from ddpstats.errors import DdpstatsError

# -- wording -----------------------------------------------------------------------------------------------------------

_ONE = {"entries": "entry", "micro-batches": "micro-batch"}


def count_of(count: int, words: str) -> str:
    """``1,024 tensors``, ``1 tensor``: ``words`` begins with the plural."""
    first, _, rest = words.partition(" ")
    if count == 1:
        first = _ONE.get(first, first.removesuffix("s"))
    return f"{count:,} {first} {rest}".rstrip()


def listed(things: Iterable[object], most: int, rest: str = " and {} more") -> str:
    """ "a, b and 3 more": at most ``most`` are named, then ``rest`` with the number of the others."""
    names = [str(one) for one in things]
    left = len(names) - most
    return ", ".join(names[:most]) + (rest.format(left) if left > 0 else "")


def first_line(error: BaseException) -> str:
    """Of its text; its class where there is none."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


@functools.lru_cache(maxsize=128)
def dtype_name(dtype: object) -> str:
    """ "float32", of a torch.dtype or of its text."""
    return str(dtype).removeprefix("torch.")


# -- rank names --------------------------------------------------------------------------------------------------------

_SHOWN_RANKS = 8


class Rank(int):
    """A global rank that knows its place in the group."""

    group_rank: int

    def __new__(cls, value: int, group_rank: int) -> Rank:
        rank = super().__new__(cls, value)
        rank.group_rank = group_rank
        return rank

    def __reduce__(self) -> tuple[type[Rank], tuple[int, int]]:
        return Rank, (int(self), self.group_rank)

    def __str__(self) -> str:
        return int.__repr__(self) if int(self) == self.group_rank else f"{int(self)} (group rank {self.group_rank})"


def members(global_ranks: Iterable[int]) -> tuple[int, ...]:
    """The global ranks of a group, ascending, each knowing its group rank."""
    return tuple(Rank(rank, place) for place, rank in enumerate(sorted(global_ranks)))


def ranks_text(ranks: Collection[int]) -> str:
    """ "rank 3" or "ranks 0, 1, 2": at most eight are named."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(sorted(ranks), _SHOWN_RANKS)}"


def holders_lines(by_rank: Mapping[int, str]) -> list[str]:
    """One line per distinct thing that ranks hold, in the order in which it first occurs: "  ranks 0, 2: a list"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, what in by_rank.items():
        ranks_of.setdefault(what, []).append(rank)
    return [f"  {ranks_text(ranks)}: {what}" for what, ranks in ranks_of.items()]


# -- report ------------------------------------------------------------------------------------------------------------

# control characters, separators of lines, marks that turn the writing direction round, and halves of characters
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MOST_LINKS = 40  # one after the other, as in Linux
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")

# The page needs nothing else: no script, no font, no picture from anywhere.
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
        rows: each its cells, a color ("red", "yellow" or none), and why it is highlighted.
    """

    header: Sequence[str]
    rows: Iterable[tuple[Sequence[Any], str, str]]
    heading: str = ""
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class VerbReport:
    """What was found.

    Attributes:
        status: the exit status of the command.
        text: for people.
        data: what is printed with ``--json``; not finite numbers are put into words, which JSON has not.
        indent: of the JSON text.
    """

    status: int
    text: Callable[[], str]
    data: Callable[[], Mapping[str, Any]]
    indent: int | None = None

    def show(self, as_json: bool) -> int:
        """Print it, and return the status. Files are written before: whoever reads stdout may have gone."""
        text = json.dumps(_strict(self.data()), indent=self.indent) if as_json else self.text()
        print(printable(text.split("\n")))
        return self.status

    def write_page(self, path: Path, title: str, sections: Iterable[Section]) -> None:
        """The text, and then sections."""
        write_file(path, lambda file: file.writelines(_page(title, self.text(), sections)))


# -- what is harmless -------------------------------------------------------------------------------------------------


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


def _strict(value: Any) -> Any:
    """Legal JSON: with words in place of the numbers that it has not."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _strict(held) for key, held in value.items()}
    return [_strict(held) for held in value] if isinstance(value, (list, tuple)) else value


# -- files ------------------------------------------------------------------------------------------------------------


def check_writable(*paths: Path | None) -> None:
    """Raises `DdpstatsError` for a file that could not be written, before the work is done that would fill it."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise DdpstatsError(f"{path} is a directory, and should be a file. Give a name in it.", path=str(path))
        if _is_special(path):
            if not os.access(path, os.W_OK):
                raise DdpstatsError(f"{path} is not writable. Give another place.", path=str(path))
            continue
        directory = _behind_links(path).parent
        if not directory.is_dir():
            raise DdpstatsError(f"{path}: there is no directory {directory}. Make it.", path=str(path))
        if not os.access(directory, os.W_OK | os.X_OK):
            raise DdpstatsError(f"{path}: {directory} is not writable. Give another place.", path=str(path))


def write_file(path: Path, write: Callable[[TextIO], object]) -> None:
    """A text file. Raises `DdpstatsError` naming it where it cannot be written, and what ``write`` raises."""

    def encoded(file: BinaryIO) -> None:
        with _as_text(file) as text:
            write(text)

    try:
        if _is_special(path):
            with _opened(path) as file:
                encoded(file)
        else:
            replace_file(_behind_links(path), encoded)
    except OSError as error:  # of the temporary file, whose name nobody gave, or of a full disk, which has none
        named = Path(error.filename or path)
        if named != path and not named.name.startswith(TEMPORARY_PREFIX):
            raise
        why = printable([f"{path} cannot be written: {error.strerror or error}."])
        raise DdpstatsError(why, path=str(path)) from None


def write_table(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """A CSV file; the first row is its header. No cell can begin a formula in a spreadsheet program."""
    write_file(path, lambda file: csv.writer(file).writerows(map(harmless, row) for row in rows))


def _is_special(path: Path) -> bool:
    """Whether it is there, and a rename would take it away from its users: a device, a pipe, what stdout goes to."""
    return path.exists() and (not path.is_file() or _standard_stream(path) is not None)


def _opened(path: Path) -> BinaryIO:
    """What is there already; for what stdout or stderr goes to, at the place that they have come to."""
    stream = _standard_stream(path)
    if stream is None:
        return open(path, "wb")
    for printed in filter(None, (sys.stdout, sys.stderr)):
        printed.flush()
    return os.fdopen(os.dup(stream), "wb")


def _standard_stream(path: Path) -> int | None:
    """The descriptor, stdout's or stderr's, by which this process writes to that file; None where neither does."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # one may be closed
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
    return None


def _behind_links(path: Path) -> Path:
    """What the name leads to. Raises `DdpstatsError` for a link that Linux would not follow (``protected_symlinks``):
    a stranger's, in a directory such as /tmp."""
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            break
        if _is_strangers(path):
            why = f"{path} is a link of another user, in a directory that everybody may write to. Give another place."
            raise DdpstatsError(why, path=str(path))
        path = path.parent / os.readlink(path)
    return path


def _is_strangers(link: Path) -> bool:
    directory = link.parent.stat()
    is_shared = stat.S_ISVTX | stat.S_IWOTH
    owners = (os.geteuid(), directory.st_uid)
    return directory.st_mode & is_shared == is_shared and link.lstat().st_uid not in owners


@contextlib.contextmanager
def _as_text(file: BinaryIO) -> Iterator[TextIO]:
    # a name in a dump may hold half a character, which no encoding has
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
    try:
        yield text
        text.flush()
    finally:
        text.detach()


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
        yield "".join(f"<td>{escape(_cell(cell))}</td>" for cell in row) + "</tr>\n"
    yield "</table>\n"


def _cell(cell: Any) -> str:
    return f"{cell:.9g}" if isinstance(cell, float) else str(cell)


# -- progress ----------------------------------------------------------------------------------------------------------

_WIDTH = 30
_EVERY_SEC = 0.2


class ProgressBar:
    """Counts bytes. Use it in a ``with``: it wipes itself away at the end."""

    def __init__(self, total_bytes: int) -> None:
        self._total = max(1, total_bytes)
        self._done = 0
        self._began = time.monotonic()
        self._shown = self._began
        self._visible = sys.stderr.isatty()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._visible:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def add(self, size_bytes: int) -> None:
        self._done += size_bytes
        now = time.monotonic()
        if not self._visible or now - self._shown < _EVERY_SEC:
            return
        self._shown = now
        share = min(1.0, self._done / self._total)
        rate = self._done / 1e6 / max(1e-9, now - self._began)
        left = (self._total - self._done) / 1e6 / max(rate, 1e-9)
        bar = "#" * int(share * _WIDTH)
        sys.stderr.write(f"\r[{bar:{_WIDTH}}] {share:4.0%}  {rate:,.0f} MB/s  {max(0.0, left):,.0f} s left \x1b[K")
        sys.stderr.flush()
