"""From what every rank holds to a new layout, or to one error for all.

Pure functions: each rank runs them on the same holdings and comes to the same end.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpstats._reduction.layout import Layout, overlay, union
from ddpstats._reduction.schema import EMPTY
from ddpstats._reduction.wire import Holding

Holdings = Sequence[tuple[Holding, tuple[int, ...]]]
"""What ranks hold, with the global ranks that hold it, in the order of the ranks."""


def agree(holdings: Holdings, base: Layout, group_name: str) -> Layout:
    """The layout that holds all paths of this call, beside those of ``base``. Raises ``SchemaConflict``."""
    unbuildable = base.unbuildable.union(*(holding.unbuildable for holding, _ in holdings))
    new = union([(holding.schema, ranks) for holding, ranks in holdings], unbuildable, group_name)
    if base.root == EMPTY:
        return Layout(new, unbuildable)
    known = union([(base.root, ())], unbuildable) if unbuildable else base.root  # may still hold a kind to be given up
    return Layout(overlay(known, new), unbuildable)
