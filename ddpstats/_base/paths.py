r"""How a path is spelled: in messages, in loggers, in reports.

``loss``, ``train/loss`` for nesting, ``l1_loss[0]`` for lists. Keys are kept verbatim. Where two paths of one layout
would be spelled alike (``{"a/b": 1, "a": {"b": 2}}``), those paths, and only those, are spelled with escapes, which
no two paths share: ``a\/b`` is one key, ``a/b`` are two, ``\0`` is the string and ``0`` the integer.

The one walk over nested dicts, lists, tuples and dataclasses: what lies in them, each with its path.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

# -- paths -------------------------------------------------------------------------------------------------------------


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


# -- containers --------------------------------------------------------------------------------------------------------

_MOST_DEEP = 200  # a bundle holds 64 levels of the user's, and writes up to three of its own for each


def walk(value: Any, path: str = "batch", *, by_field: bool = False) -> Iterator[tuple[str, Any]]:
    """(path, leaf) for every leaf, in order. What lies inside itself, or too deep, is a leaf.

    ``by_field``: what a namedtuple holds is reached by the names of its fields, not by places.
    """
    return _walk(value, path, by_field, ())


def _walk(value: Any, path: str, by_field: bool, around: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    held = None if is_endless(value, around) else _held(value, by_field)
    if held is None:
        yield path, value
        return
    around = (*around, id(value))
    for step, item in held:
        yield from _walk(item, path + step, by_field, around)


def _held(value: Any, by_field: bool) -> Iterable[tuple[str, Any]] | None:
    """How each thing in a container is reached, and the thing; None for a leaf."""
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        names = getattr(type(value), "_fields", None) if by_field else None
        if names is None:
            return ((f"[{place}]", item) for place, item in enumerate(value))
        return ((f".{name}", item) for name, item in zip(names, value, strict=True))
    if type(value) is SimpleNamespace:  # what a bundle makes of a dataclass
        return ((f".{name}", item) for name, item in vars(value).items())
    if is_dataclass(value) and not isinstance(value, type):
        return ((f".{name}", getattr(value, name)) for name in set_fields(value))
    return None


def is_endless(value: Any, around: tuple[int, ...]) -> bool:
    """Whether it lies inside itself, or too deep to be stored. ``around``: the ids of what it lies in."""
    return len(around) > _MOST_DEEP or id(value) in around


def set_fields(value: Any) -> list[str]:
    """Of a dataclass: a field may have no value."""
    return [one.name for one in fields(value) if hasattr(value, one.name)]
