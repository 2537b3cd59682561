"""An entry whose tensors are looked for once, however many checks ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from ddpstats.dump.format._entries import Entry, Leaf


class WalkedOnce(Entry):
    """An entry that keeps the lists of its inputs and outputs: to find and check them is the cost of the search."""

    def inputs(self) -> Iterator[tuple[str, Leaf]]:
        return iter(self._inputs)

    def outputs(self) -> Iterator[tuple[str, Leaf]]:
        return iter(self._outputs)

    @cached_property
    def _inputs(self) -> list[tuple[str, Leaf]]:
        return list(super().inputs())

    @cached_property
    def _outputs(self) -> list[tuple[str, Leaf]]:
        return list(super().outputs())
