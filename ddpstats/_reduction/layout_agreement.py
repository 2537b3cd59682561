"""From what each rank holds to a layout for all, or to one error for all. Pure functions of plain values.

1. `union`: the schemas of one call become one tree, or a ``SchemaConflict`` that names path and ranks.
2. `overlay`: that tree is laid over the layout agreed before. What this call contradicts is replaced, the rest stays.

Each rank runs them on the same holdings and comes to the same end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ddpstats._base.paths import Path, Step, format_path
from ddpstats._base.text import ranks_text
from ddpstats._reduction.layout import Layout
from ddpstats._reduction.schema import (
    DICT,
    EMPTY,
    NONE_LEAF,
    Container,
    Leaf,
    Node,
    common_kind,
    describe,
    is_flat,
    is_sequence,
    leaf,
    shape_of,
    step_into,
)
from ddpstats._reduction.wire import Holding
from ddpstats.errors import SchemaConflict

_SHOWN_CONFLICTS = 5

Held = Sequence[tuple[Node, tuple[int, ...]]]
"""Schemas and the global ranks that hold each: ranks with equal schemas stand together."""

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


# -- 1. union ---------------------------------------------------------------------------------------------------------


def union(held: Held, unbuildable: Collection[str] = (), group_name: str | None = None) -> Node:
    """One tree of all paths that some rank holds, in the order of the ranks.

    ``unbuildable`` are kinds that some rank cannot construct; they become plain dicts.
    Raises ``SchemaConflict`` where ranks hold a leaf and a container, a mapping and a sequence, or two reduce ops.
    """
    node, conflicts = _united(held, unbuildable)
    if conflicts:
        raise _conflict_error(conflicts, group_name)
    return node


def _united(held: Held, unbuildable: Collection[str]) -> tuple[Node, list[tuple[Path, Held]]]:
    conflicts: list[tuple[Path, Held]] = []
    return _unite(_without_idle_roots(held), (), frozenset(unbuildable), conflicts), conflicts


def _without_idle_roots(held: Held) -> Held:
    """Without the empty roots that are of another shape than what the other ranks hold: they hold no path."""
    telling = [node for node, _ in held if (node.keys if isinstance(node, Container) else node.op != "none")]
    shape = shape_of((telling or [node for node, _ in held if isinstance(node, Container)] or [NONE_LEAF])[0])
    return [(node, ranks) for node, ranks in held if isinstance(node, Leaf) or node.keys or shape_of(node) == shape]


def _unite(held: Held, path: Path, unbuildable: frozenset[str], conflicts: list[tuple[Path, Held]]) -> Node:
    some = [(node, ranks) for node, ranks in held if not (isinstance(node, Leaf) and node.op == "none")]
    if not some:
        return NONE_LEAF
    if len({shape_of(node) for node, _ in some}) > 1:
        conflicts.append((path, held))
        return some[0][0]
    first = some[0][0]
    if isinstance(first, Leaf):
        return leaf(first.op, _merged(*(node.dtypes for node, _ in some if isinstance(node, Leaf))))
    containers = [(node, ranks) for node, ranks in some if isinstance(node, Container)]
    nullable = len(some) < len(held) or any(node.nullable for node, _ in containers)
    return _unite_containers(containers, path, nullable, unbuildable, conflicts)


def _unite_containers(
    held: Sequence[tuple[Container, tuple[int, ...]]],
    path: Path,
    nullable: bool,
    unbuildable: frozenset[str],
    conflicts: list[tuple[Path, Held]],
) -> Node:
    kinds = _merged(*(node.kinds for node, _ in held))
    if unbuildable:
        kinds = _merged(tuple(DICT if kind in unbuildable else kind for kind in kinds))
    first = held[0][0]
    if is_flat(first) and all(node.keys == first.keys and node.children == first.children for node, _ in held):
        return Container(kinds, first.keys, first.children, nullable)
    by_key: dict[Step, list[tuple[Node, tuple[int, ...]]]] = {}
    for node, ranks in held:
        for key, child in zip(node.keys, node.children, strict=True):
            by_key.setdefault(key, []).append((child, ranks))
    keys = _in_order(by_key, first)
    children = tuple(_unite(by_key[key], (*path, step_into(first, key)), unbuildable, conflicts) for key in keys)
    return Container(kinds, keys, children, nullable)


def _merged(*parts: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(parts)) == 1:
        return tuple(dict.fromkeys(parts[0]))
    return tuple(dict.fromkeys(text for part in parts for text in part))


def _in_order(keys: Collection[Step], owner: Container) -> tuple[Step, ...]:
    if is_sequence(owner.kinds[0]):
        return tuple(sorted(key for key in keys if isinstance(key, int)))
    return tuple(keys)


def _conflict_error(conflicts: list[tuple[Path, Held]], group_name: str | None) -> SchemaConflict:
    lines: list[str] = []
    involved = {rank for _, held in conflicts for _, ranks in held for rank in ranks}
    for path, held in conflicts[:_SHOWN_CONFLICTS]:
        what = f"different things under {format_path(path)!r}" if path else "different stats"
        lines.append(f"ranks{f' of {group_name}' if group_name else ''} hold {what}:")
        by_what: dict[str, list[int]] = {}
        for node, ranks in held:
            by_what.setdefault(describe(node), []).extend(ranks)
        lines += [f"  {ranks_text(ranks)}: {what}" for what, ranks in by_what.items()]
    if len(conflicts) > _SHOWN_CONFLICTS:
        lines.append(f"and {len(conflicts) - _SHOWN_CONFLICTS} more paths")
    lines.append(
        "Give each path one structure and one reduce op on all ranks, or use different keys. Nothing was reduced."
    )
    first = format_path(conflicts[0][0]) or None
    return SchemaConflict("\n".join(lines), ranks=involved, path=first, group=group_name)


def merge_adds(*schemas: Node) -> Node:
    """One rank's own adds as one schema: as if each were a rank's, and each container of one kind, as ranks hold it.

    Raises ``SchemaConflict``, on this rank alone, where the last of them does not fit the others.
    """
    node, conflicts = _united([(schema, ()) for schema in schemas], ())
    if not conflicts:
        return _with_one_kind(node)
    path = format_path(conflicts[0][0])
    earlier, *_, now = (describe(node) for node, _ in conflicts[0][1])
    more = f" (and at {len(conflicts) - 1} more paths)" if len(conflicts) > 1 else ""
    raise SchemaConflict(
        f"stats that do not fit the earlier ones of this window at {path!r}{more}: {earlier} before, {now} now.\n"
        "Give each path one structure and one reduce op, or use different keys. Nothing was added; the window goes on "
        "working.",
        path=path or None,
    )


def _with_one_kind(node: Node) -> Node:
    if isinstance(node, Leaf):
        return node
    if node.nullable and not node.keys:
        return NONE_LEAF
    children = node.children if is_flat(node) else tuple(map(_with_one_kind, node.children))
    return Container((common_kind(node.kinds),), node.keys, children)


# -- 2. overlay -------------------------------------------------------------------------------------------------------


def overlay(base: Node, new: Node) -> Node:
    """``new`` with what ``base`` knows besides: old paths keep their order, what ``new`` contradicts is gone."""
    if isinstance(new, Leaf):
        if isinstance(base, Container):
            return base._replace(nullable=True) if new.op == "none" and base.keys else new
        if new.op == "none":
            return base
        return leaf(new.op, _merged(base.dtypes, new.dtypes)) if base.op == new.op else new
    if isinstance(base, Leaf):
        return new._replace(nullable=True) if base.op == "none" else new
    if not base.keys or is_sequence(base.kinds[0]) != is_sequence(new.kinds[0]):
        return new
    return _overlay_containers(base, new)


def _overlay_containers(base: Container, new: Container) -> Node:
    kinds, nullable = _merged(base.kinds, new.kinds), base.nullable or new.nullable
    if base.keys == new.keys and base.children == new.children:
        return Container(kinds, base.keys, base.children, nullable)
    children = dict(zip(base.keys, base.children, strict=True))
    for key, child in zip(new.keys, new.children, strict=True):
        known = children.get(key)
        children[key] = child if known is None else overlay(known, child)
    if not is_sequence(base.kinds[0]):
        return Container(kinds, tuple(children), tuple(children.values()), nullable)
    keys = _in_order(children, base)
    return Container(kinds, keys, tuple(children[key] for key in keys), nullable)
