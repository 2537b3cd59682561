"""A result's values back to nested stats, in the kinds of containers that ranks gave: dicts, lists, users' classes."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

from ddpstats._base.paths import Step
from ddpstats._reduction.schema import (
    DATACLASS,
    DICT,
    LIST,
    ORDERED_DICT,
    Leaf,
    Node,
    common_kind,
    is_flat,
    is_sequence,
)

Builder = Callable[[Iterator[Any]], Any]
"""Takes as many values as the schema has leaves, in order, and nests them."""


def builder(schema: Node) -> Builder:
    """What nests values as ``schema``, worked out once: what it returns runs on every step."""
    if isinstance(schema, Leaf):
        return next
    kind = common_kind(schema.kinds)
    if kind == DICT and is_flat(schema):
        return _dict_builder(schema.keys)
    keys, assemble = schema.keys, _assembler(kind)
    if is_flat(schema):
        count = len(keys)
        return lambda values: assemble(keys, islice(values, count))
    children = [builder(child) for child in schema.children]
    return lambda values: assemble(keys, [build(values) for build in children])


def _dict_builder(keys: tuple[Step, ...]) -> Builder:
    """A copy of a dict with these keys needs no hashing and no growing: a quarter faster than making one from pairs."""
    template = dict.fromkeys(keys)

    def build(values: Iterator[Any]) -> dict[Step, Any]:
        found = template.copy()
        found.update(zip(keys, values))  # noqa: B905  # values of other branches may follow
        return found

    return build


def _assembler(kind: str) -> Callable[[tuple[Step, ...], Iterable[Any]], Any]:
    if kind == DICT:
        return lambda keys, values: dict(zip(keys, values, strict=True))
    if kind == ORDERED_DICT:
        return lambda keys, values: OrderedDict(zip(keys, values, strict=True))
    if is_sequence(kind):
        return _build_list if kind == LIST else lambda keys, values: tuple(_build_list(keys, values))
    cls = find_class(kind)
    return _assembler(DICT) if cls is None else partial(_build_instance, cls)


def _build_list(keys: tuple[Step, ...], values: Iterable[Any]) -> list[Any]:
    """Positions that no rank filled (an empty dict in a list, say) are None, so that the others keep theirs."""
    if not keys or keys[-1] == len(keys) - 1:
        return list(values)
    filled: list[Any] = [None] * (int(keys[-1]) + 1)
    for key, value in zip(keys, values, strict=True):
        filled[int(key)] = value
    return filled


def _build_instance(cls: type, keys: tuple[Step, ...], values: Iterable[Any]) -> Any:
    """A namedtuple or dataclass, past its ``__init__``: that may compute, check or default what was reduced already."""
    given = dict(zip(keys, values, strict=True))
    names = _field_names(cls)
    if issubclass(cls, tuple):
        return tuple.__new__(cls, [given.get(name) for name in names])
    instance = object.__new__(cls)
    for name in names:
        object.__setattr__(instance, name, given.get(name))
    return instance


def _field_names(cls: type) -> tuple[str, ...]:
    fields: Any = getattr(cls, "_fields", None)
    return tuple(fields) if fields is not None else tuple(item.name for item in dataclasses.fields(cls))


# -- classes of the user ----------------------------------------------------------------------------------------------

# Classes seen in this process's own stats. Weak: a class made inside a function may go with it.
_seen: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def remember_class(prefix: str, cls: type) -> str:
    kind = f"{prefix}{cls.__module__}:{cls.__qualname__}"
    _seen[kind] = cls
    return kind


def find_class(kind: str) -> type | None:
    """The class a kind names, if it was seen here or its module is loaded; None otherwise. Nothing is ever imported."""
    seen = _seen.get(kind)
    if seen is not None:
        return seen
    prefix, module, name = kind.split(":", 2)
    try:
        found = attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
    if not isinstance(found, type):
        return None
    fits = dataclasses.is_dataclass(found) if prefix + ":" == DATACLASS else hasattr(found, "_fields")
    return found if fits else None


def buildable(kind: str) -> bool:
    """Whether this process can construct a container of ``kind``."""
    return ":" not in kind or find_class(kind) is not None
