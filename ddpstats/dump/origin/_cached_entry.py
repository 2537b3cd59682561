"""An entry that several look at."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from ddpstats.dump.format._entries import Entry, Leaf


class WalkedOnce(Entry):
    """An entry whose tensors are asked for by several, and looked for, and checked, once."""

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
