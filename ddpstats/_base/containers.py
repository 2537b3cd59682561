"""The leaves of nested dicts, lists, tuples and dataclasses, each with its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

_MOST_DEEP = 80  # a little more than a bundle can hold, which says so by name


def walk(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """(path, leaf) for every leaf of nested containers, in the order of `begin`."""
    return _walk(value, path, ())


def _walk(value: Any, path: str, around: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if is_endless(value, around):
        yield path, value
        return
    around = (*around, id(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, f"{path}[{key!r}]", around)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _walk(item, f"{path}[{place}]", around)
    elif is_dataclass(value) and not isinstance(value, type):
        for name in set_fields(value):
            yield from _walk(getattr(value, name), f"{path}.{name}", around)
    else:
        yield path, value


def is_endless(value: Any, around: tuple[int, ...]) -> bool:
    """Whether it lies inside itself, or too deep to be stored. ``around``: the ids of what it lies in."""
    return len(around) > _MOST_DEEP or id(value) in around


def set_fields(value: Any) -> list[str]:
    return [one.name for one in fields(value) if hasattr(value, one.name)]
