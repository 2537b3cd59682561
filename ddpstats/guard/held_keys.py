"""Which keys this rank has stopped holding in its reductions: those that it held once, and in its last calls did not.

Pure. Structures and layouts are compared by identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpstats._reduction.flatten import Structure
    from ddpstats._reduction.layout import Layout

ROUNDS = 4
"""A key that a rank held before, and in none of so many calls of its name, it has stopped holding."""


class HeldKeys:
    """The structures that this rank held in the calls of one name. Names are compared only where these differ."""

    def __init__(self) -> None:
        self._calls = 0
        self._held: set[Structure] = set()
        self._before: tuple[set[Structure], Layout] | None = None
        self._ever: set[str] = set()  # as far as the layout still has them
        self._reported: list[str] = []

    def take(self, structure: Structure, layout: Layout) -> list[str] | None:
        """Note one call. Return the keys that this rank has stopped holding, where they differ from those before."""
        self._held.add(structure)
        self._calls += 1
        if self._calls < ROUNDS:
            return None
        held, self._held, self._calls = self._held, set(), 0
        if self._before is not None and self._before[0] == held and self._before[1] is layout:
            return None
        self._before = held, layout
        names = layout.names
        now = {names[layout.slot_of[leaf]] for structure in held for leaf in structure.leaves if leaf in layout.slot_of}
        self._ever = (self._ever | now).intersection(names)
        missing = [path for path in dict.fromkeys(names) if path in self._ever and path not in now]
        if missing == self._reported:
            return None
        self._reported = missing
        return missing
