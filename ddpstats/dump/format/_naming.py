"""Names of entries, and how often each was given in this step.

1. A call is numbered when it begins, whether it is wanted or not: names do not depend on what was selected.
2. The backward pass of a call has the number of the call, for it belongs to it; a second one has ``.1`` after that.
"""

from __future__ import annotations

import zlib
from collections import Counter

ROOT = "root"


class Counters:
    """How often each thing was called since the step began."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def next(self, what: str) -> int:
        """0 for the first, 1 for the second, ..."""
        number = self._seen[what]
        self._seen[what] = number + 1
        return number


def module_base(path: str, class_name: str) -> str:
    """``Module.{path}.{class}``; the path of the whole model is empty, and called ``root``."""
    return f"Module.{path or ROOT}.{class_name}"


def backward_of(forward: str) -> str:
    """The name of the backward pass of a call."""
    head, _, tail = forward.rpartition(".")
    if tail == "forward":
        return f"{head}.backward"
    return f"{head.removesuffix('.forward')}.backward.{tail}"


def file_name(name: str, path: str) -> str:
    """Of the file that holds a tensor of an entry.

    What a file system may not take is replaced, and what is too long is cut, at the end of the entry's name; a checksum
    of the whole keeps such names apart.
    """
    head, tail = _plain(name), _plain(path)
    if (head, tail) != (name, path) or len(head) + len(tail) > _LONGEST:
        tail = tail[-_LONGEST_PATH:]
        mark = f"-{zlib.crc32(f'{name}.{path}'.encode(errors='surrogatepass')):08x}"
        head = head[: _LONGEST - len(tail) - len(mark)] + mark
    return f"{head}.{tail}.pt"


def _plain(text: str) -> str:
    return "".join(one if (one.isascii() and one.isalnum()) or one in "._-" else "_" for one in text)


_LONGEST, _LONGEST_PATH = 230, 100
