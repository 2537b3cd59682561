r"""How a path is spelled: in messages, in loggers, in reports.

``loss``, ``train/loss`` for nesting, ``l1_loss[0]`` for lists. Keys are kept verbatim. Where two paths of one layout
would be spelled alike (``{"a/b": 1, "a": {"b": 2}}``), those paths, and only those, are spelled with escapes, which
no two paths share: ``a\/b`` is one key, ``a/b`` are two, ``\0`` is the string and ``0`` the integer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence


class Index(int):
    """A position in a sequence, in distinction to an integer key of a dict."""

    __slots__ = ()


Step = str | int
Path = tuple[Step, ...]

_SPECIAL = re.compile(r"[\\/\[\]]")
_LOOKS_LIKE_INT = re.compile(r"-?[0-9]")


def format_path(path: Path) -> str:
    """The verbatim spelling; not unique. The path of a bare leaf is the empty string."""
    if len(path) == 1 and type(path[0]) is str:
        return path[0]
    return _join(path, str)


def escape_path(path: Path) -> str:
    """The escaped spelling; no two paths share one."""
    return _join(path, _escape_key)


def unique_names(paths: Sequence[Path]) -> list[str]:
    """One name per path, verbatim where that is unique among ``paths``, escaped where it is not."""
    names = [format_path(path) for path in paths]
    if len(set(names)) == len(names):
        return names
    escaped = [False] * len(names)
    while True:
        # An escaped name may meet another path's verbatim one: that one is escaped in the next round. Escaped names
        # never meet each other, so every round escapes one more and this ends.
        count = Counter(names)
        clashing = [i for i, name in enumerate(names) if count[name] > 1 and not escaped[i]]
        if not clashing:
            return names
        for i in clashing:
            names[i], escaped[i] = escape_path(paths[i]), True


def _join(path: Path, spell: type[str] | object) -> str:
    parts: list[str] = []
    for step in path:
        if isinstance(step, Index):
            parts.append(f"[{int(step)}]")
        else:
            parts.append(("/" if parts else "") + (spell(step) if callable(spell) else str(step)))
    return "".join(parts)


def _escape_key(key: Step) -> str:
    if isinstance(key, int):
        return str(key)
    text = _SPECIAL.sub(lambda found: "\\" + found.group(), key)
    if not text:
        return "\\e"  # a bare backslash would make an escaped slash of the separator that follows
    return "\\" + text if _LOOKS_LIKE_INT.match(text) else text
