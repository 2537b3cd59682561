"""The walk that finds what nested dicts, lists, tuples and dataclasses hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

_MOST_DEEP = 200  # a bundle holds 64 levels of the user's, and writes up to three more for each


def walk(value: Any, path: str = "batch", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf, in order. A container that contains itself, or lies too deep, is a leaf.

    ``around``: the ids of the containers that ``value`` is in.
    """
    items = None if is_endless(value, around) else _items(value)
    if items is None:
        yield path, value
        return
    for step, item in items:
        yield from walk(item, path + step, (*around, id(value)))


def _items(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return the items of a container, each with its step of the path; None for a leaf."""
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", item) for key, item in value.items())
    names = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and isinstance(names, tuple) and len(names) == len(value):
        return ((f".{name}", item) for name, item in zip(names, value, strict=True))
    if isinstance(value, (list, tuple)):
        return ((f"[{index}]", item) for index, item in enumerate(value))
    if type(value) is SimpleNamespace:  # represents a dataclass in a bundle
        return ((f".{name}", item) for name, item in vars(value).items())
    if is_dataclass(value) and not isinstance(value, type):
        return ((f".{name}", getattr(value, name)) for name in set_fields(value))
    return None


def is_endless(value: Any, around: tuple[int, ...]) -> bool:
    """Return whether a value contains itself, or lies too deep to be stored."""
    return len(around) > _MOST_DEEP or id(value) in around


def set_fields(value: Any) -> list[str]:
    """Return the names of a dataclass's fields that have a value."""
    return [field.name for field in fields(value) if hasattr(value, field.name)]
