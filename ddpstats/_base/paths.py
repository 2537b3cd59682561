r"""Paths: how one is written in messages, loggers and reports.

``loss``, ``train/loss`` for nesting, ``l1_loss[0]`` for lists. Keys are kept verbatim. Where two paths of one layout
would read the same (``{"a/b": 1, "a": {"b": 2}}``), those paths, and only those, are written with escapes, which no two
paths share: ``a\/b`` is one key, ``a/b`` are two, ``\0`` is the string and ``0`` the integer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence


class Index(int):
    """A position in a sequence, in distinction to an integer key of a dict."""

    __slots__ = ()


Step = str | int
Path = tuple[Step, ...]

_SPECIAL = re.compile(r"[\\/\[\]]")
_LOOKS_LIKE_INT = re.compile(r"-?[0-9]")


def format_path(path: Path) -> str:
    """Return the verbatim name, which may not be unique. The path of a bare leaf is the empty string."""
    return _join(path, str)


def escape_path(path: Path) -> str:
    """Return the escaped name, which no two paths share."""
    return _join(path, _escape_key)


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return one name per path, verbatim where that is unique among ``paths``, otherwise escaped."""
    names = [format_path(path) for path in paths]
    if len(set(names)) == len(names):
        return names
    escaped: set[int] = set()
    while True:
        # An escaped name may equal another path's verbatim one: that one is escaped in the next round. Escaped names
        # never equal each other, so every round escapes one more and this ends.
        count = Counter(names)
        clashing = [i for i, name in enumerate(names) if count[name] > 1 and i not in escaped]
        if not clashing:
            return names
        escaped.update(clashing)
        for i in clashing:
            names[i] = escape_path(paths[i])


def _join(path: Path, format_key: Callable[[Step], str]) -> str:
    texts = [f"[{int(step)}]" if isinstance(step, Index) else f"/{format_key(step)}" for step in path]
    return "".join(texts).removeprefix("/")


def _escape_key(key: Step) -> str:
    if isinstance(key, int):
        return str(key)
    text = _SPECIAL.sub(lambda match: "\\" + match.group(), key)
    if not text:
        return "\\e"  # a bare backslash would escape the separator that follows
    return "\\" + text if _LOOKS_LIKE_INT.match(text) else text
