"""The one walk over nested dicts, lists, tuples and dataclasses: what lies in them, each with its path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

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
