"""What stands beside a name in its container: read again where the container may have changed, and kept otherwise.

A program walks a dict again and again. What is read of it is one object for as long as it is the same, so that all that
hangs on it can be kept as well. Read again are a container that is another object or has another size, and any at the
first of its names: there the next walk begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpstats._base.caches import BoundedCache
from ddpstats.guard.labels.read import (
    MISSING,
    PLAIN_DICTS,
    aliases_in,
    entries_of,
    instance_dict,
    is_module,
    kind_of,
    names_in,
    parameter_names,
)

_MAX_KEPT = 4096
_MAX_NAMES = 1 << 16  # in all of them


@dataclass(frozen=True, eq=False)
class Siblings:
    """The names in a container, in its order, and the container's class. ``aliases``: of tensors with several names."""

    names: tuple[str, ...] = ()
    source: str = ""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_Last = tuple[tuple[int, int, int], tuple[str, ...] | None, Siblings, frozenset[str]]

_NONE = Siblings()
_kept: BoundedCache[tuple[Any, ...], Siblings] = BoundedCache(_MAX_KEPT, _MAX_NAMES)


class Containers:
    """Those that one place of the program takes elements of, one after the other: what was read of the last."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        # Its id, its size, the id of its first key; its keys, where they are texts alone and no two have one value; its
        # names but the first. One tuple, for several threads may be at this place.
        self._last: _Last = (0, 0, 0), None, _NONE, frozenset()

    def siblings(self, name: str, container: Any) -> Siblings:
        """Of ``name`` in ``container``."""
        if container is MISSING:
            return _NONE
        entries = entries_of(container)
        if entries is None:
            now = id(container), _size(container), 0
        else:
            now = id(container), dict.__len__(entries), id(next(dict.__iter__(entries), None))
        before, keys_before, read, later = self._last
        if now == before and name in later:
            return read
        keys = _texts_alone(container) if type(container) is dict else None
        if keys is None or keys != keys_before:
            read = _read(container, entries, name)
            later = frozenset(read.names).difference(read.names[:1])
        self._last = now, keys, read, later
        return read


def _size(container: Any) -> int:
    return len(container if kind_of(container) in (list, tuple) else instance_dict(container) or ())


def _texts_alone(container: dict[Any, Any]) -> tuple[str, ...] | None:
    """The keys of a dict; None where one is no text, or two have the same value."""
    keys = tuple(container)
    for key in keys:
        if type(key) is not str:
            return None
    return keys if len(set(map(id, container.values()))) == len(keys) else None


def _read(container: Any, entries: Any, name: str) -> Siblings:
    kind = kind_of(container)
    if kind not in PLAIN_DICTS and is_module(container):
        in_table = entries is not None and name in entries
        return _same(names_in(container) if in_table else tuple(parameter_names(container)), "Module", {})
    return _same(names_in(container), kind.__name__, {} if entries is None else aliases_in(entries))


def _same(names: tuple[str, ...], source: str, aliases: dict[str, tuple[str, ...]]) -> Siblings:
    """One object for the same names."""
    key = names, source, *aliases.items()
    found = _kept.get(key)
    if found is None:
        found = _kept.put(key, Siblings(names, source, aliases), len(names))
    return found
