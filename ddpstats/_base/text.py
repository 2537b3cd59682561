"""Text for people: words that messages share, names of ranks, and the reports of the command's verbs.

A report is shown as text or as one JSON object. Names in it may come from untrusted files, so whatever reaches a
terminal or a JSON parser is made harmless here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ddpstats._base.files import TEMPORARY_PREFIX, replace_file
from ddpstats.errors import DdpstatsError

# -- words of messages -------------------------------------------------------------------------------------------------

_SINGULARS = {"entries": "entry", "micro-batches": "micro-batch"}
_SHOWN_RANKS = 8


def count_of(count: int, words: str) -> str:
    """Return ``1,024 tensors`` or ``1 tensor``; ``words`` begins with the plural."""
    noun, _, rest = words.partition(" ")
    if count == 1:
        noun = _SINGULARS.get(noun, noun.removesuffix("s"))
    return f"{count:,} {noun} {rest}".rstrip()


def shorten(things: Iterable[object], most: int, rest: str = " and {} more") -> str:
    """Return "a, b and 3 more": the first ``most`` things, then ``rest`` with the number of the others."""
    names = [str(thing) for thing in things]
    left = len(names) - most
    return ", ".join(names[:most]) + (rest.format(left) if left > 0 else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class if it has none."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


@functools.lru_cache(maxsize=128)
def dtype_name(dtype: object) -> str:
    """Return "float32" for a torch.dtype or for its text."""
    return str(dtype).removeprefix("torch.")


# -- ranks in messages: global, with the group rank in parentheses where it differs ------------------------------------


class Rank(int):
    """A global rank that knows its rank in the group."""

    group_rank: int

    def __new__(cls, value: int, group_rank: int) -> Rank:
        rank = super().__new__(cls, value)
        rank.group_rank = group_rank
        return rank

    def __reduce__(self) -> tuple[type[Rank], tuple[int, int]]:
        return Rank, (int(self), self.group_rank)

    def __str__(self) -> str:
        return int.__repr__(self) if int(self) == self.group_rank else f"{int(self)} (group rank {self.group_rank})"


def ranks_text(ranks: Collection[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2", with at most eight of them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {shorten(sorted(ranks), _SHOWN_RANKS)}"


def holders_lines(by_rank: Mapping[int, str]) -> list[str]:
    """Return a line for each distinct text, "  ranks 0, 2: a list", in the order in which they first occur."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in by_rank.items():
        ranks_of.setdefault(text, []).append(rank)
    return [f"  {ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items()]


# -- harmless text -----------------------------------------------------------------------------------------------------

# control characters, line separators, marks that reverse the writing direction, and lone surrogates
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(lines: Iterable[str]) -> str:
    """Join lines to a text that holds no control characters but the ends of lines."""
    return "\n".join(_UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], line) for line in lines)


def strict_json(value: Any) -> Any:
    """Return ``value`` with words in place of the numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: strict_json(item) for key, item in value.items()}
    return [strict_json(item) for item in value] if isinstance(value, (list, tuple)) else value


# -- reports of verbs --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Keep what is printed meanwhile, in Python, by number or in C, out of the one JSON object of a verb."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)


def print_report(status: int, as_json: bool, text: Callable[[], str], data: Callable[[], Mapping[str, Any]]) -> int:
    """Print the result of a verb and return its status. Write files before: the reader of stdout may be gone.

    Args:
        status: the exit status of the command.
        as_json: print ``data`` and not ``text``; numbers that are not finite become words, because JSON lacks them.
    """
    print(printable((json.dumps(strict_json(data())) if as_json else text()).split("\n")))
    return status


# -- files that a user names -------------------------------------------------------------------------------------------


def check_writable(*paths: Path | None) -> None:
    """Raise `DdpstatsError` if a file cannot be written, before the work that would fill it is done."""
    for path in filter(None, paths):
        if path.is_dir():
            raise DdpstatsError(f"{path} is a directory, and should be a file. Give a name in it.", path=str(path))
        needed = path.parent if _is_replaced(path) else path
        if needed != path and not needed.is_dir():
            raise DdpstatsError(f"{path}: there is no directory {needed}. Make it.", path=str(path))
        if not os.access(needed, os.W_OK):
            raise DdpstatsError(f"{path}: {needed} is not writable. Give another path.", path=str(path))


def write_file(path: Path, write: Callable[[TextIO], object]) -> None:
    """Write a text file that is complete or absent. Raises `DdpstatsError` that names it, and what ``write`` raises.

    A link to a file is replaced, and never followed, since it may be another user's. A pipe or a device is written
    into; ``/dev/stdout`` and ``/dev/stderr`` after what was printed.
    """

    def write_text(file: BinaryIO) -> None:
        # a name in an untrusted file may hold a lone surrogate, which no encoding has
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        try:
            write(text)
        finally:
            text.detach()

    stream = {"/dev/stdout": sys.stdout, "/dev/stderr": sys.stderr}.get(str(path))
    if stream is not None:
        write(stream)
        return
    try:
        if _is_replaced(path):
            replace_file(path, write_text)
        else:
            with open(path, "wb") as file:
                write_text(file)
    except OSError as error:
        failed = Path(error.filename or path)
        if failed != path and not failed.name.startswith(TEMPORARY_PREFIX):
            raise
        reason = printable([f"{path} cannot be written: {error.strerror or error}."])
        raise DdpstatsError(reason, path=str(path)) from None


def _is_replaced(path: Path) -> bool:
    """Return whether a new file takes this name: it leads to a regular file, or to nothing."""
    return path.is_file() or not path.exists()
