"""Keys that came and keys that a rank holds no more, told to whoever watches the ranks; to nobody by default.

While somebody listens, the calls of one name are taken `ROUNDS` at a time. What a rank held before, and in none of
those, it has stopped holding. One call adds a pointer to a set; names are only looked at where that set is another one
than `ROUNDS` calls ago. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ddpstats._reduction.layout import Layout, place

if TYPE_CHECKING:
    from ddpstats._reduction.tree import Structure

ROUNDS = 4


class KeyListener(Protocol):
    """Told of reductions by their names. Local; must neither wait nor raise."""

    def renegotiated(self, name: str | None, new_keys: Sequence[str]) -> None:
        """All ranks have a new layout. ``new_keys``: paths that the one before lacked."""

    def stopped_holding(self, name: str | None, keys: Sequence[str]) -> None:
        """All paths of the layout that this rank held once, and in the last `ROUNDS` calls or more did not."""


listeners: list[KeyListener] = []


class HeldKeys:
    """What this rank held in the calls of one name."""

    def __init__(self) -> None:
        self._calls = 0
        self._held: set[Structure] = set()
        self._before: tuple[set[Structure], Layout] | None = None
        self._ever: set[str] = set()  # as far as the layout still has them
        self._told: list[str] = []

    def take(self, name: str | None, layout: Layout, structure: Structure) -> None:
        """One call, in which this rank held ``structure``."""
        self._held.add(structure)
        self._calls += 1
        if self._calls < ROUNDS:
            return
        held, self._held, self._calls = self._held, set(), 0
        if self._before is None or self._before[0] != held or self._before[1] is not layout:
            self._before = held, layout
            self._look(name, layout, held)

    def _look(self, name: str | None, layout: Layout, held: set[Structure]) -> None:
        names = layout.names
        now = {names[slot] for structure in held for slot in place(structure.schema, layout).slots if slot in names}
        self._ever = (self._ever | now).intersection(names.values())
        missing = [path for path in names.values() if path in self._ever and path not in now]
        if missing != self._told:
            self._told = missing
            for listener in tuple(listeners):
                listener.stopped_holding(name, missing)
