"""From what each rank holds to what all ranks agree on. Pure functions of plain values.

1. `union`: the schemas of one call become one tree, or a ``SchemaConflict`` that names path and ranks.
2. `overlay`: that tree is laid over the layout agreed before. What this call contradicts is replaced, the rest stays.
3. `Layout`: the tree with its slots numbered, its fingerprint, and the slots that are not plain means.
4. `place`: where one rank's leaves go in a layout; ``stale`` if it holds what the layout lacks.
5. `select`: which paths some rank held in a call, read from the codes lane: the shape of the result.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress

from ddpstats._agreement.codec import fingerprint
from ddpstats._base.paths import Path, Step, format_path, unique_names
from ddpstats._base.rank_names import ranks_text
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
    leaf_nodes,
    marker_count,
    slot_count,
    step_into,
)
from ddpstats._reduction.wire import encode_schema
from ddpstats.errors import SchemaConflict

# The codes lane of a slot counts three things over ranks in one float64, exact for fewer than 2**17 ranks.
PRESENT, NONFINITE, NONE = 1, 1 << 17, 1 << 34
_COUNT = (1 << 17) - 1

_SHOWN_CONFLICTS = 5

Held = Sequence[tuple[Node, tuple[int, ...]]]
"""Schemas and the global ranks that hold each: ranks with equal schemas stand together."""


# -- 1. union ---------------------------------------------------------------------------------------------------------


def union(held: Held, unbuildable: Collection[str] = (), group_name: str | None = None) -> Node:
    """One tree of all paths that some rank holds, in the order of the ranks.

    ``unbuildable`` are kinds that some rank cannot construct; they become plain dicts.
    Raises ``SchemaConflict`` where ranks hold a leaf and a container, a mapping and a sequence, or two reduce ops.
    """
    conflicts: list[tuple[Path, Held]] = []
    node = _unite(_without_idle_roots(held), (), frozenset(unbuildable), conflicts)
    if conflicts:
        raise _conflict_error(conflicts, group_name)
    return node


def _without_idle_roots(held: Held) -> Held:
    """Without the empty roots that are of another shape than what the other ranks hold: they hold no path."""
    telling = [node for node, _ in held if (node.keys if isinstance(node, Container) else node.op != "none")]
    shape = _shape((telling or [node for node, _ in held if isinstance(node, Container)] or [NONE_LEAF])[0])
    return [(node, ranks) for node, ranks in held if isinstance(node, Leaf) or node.keys or _shape(node) == shape]


def _shape(node: Node) -> str:
    """What must be alike on all ranks that hold a path."""
    if isinstance(node, Leaf):
        return f"leaf {node.op}"
    return "sequence" if is_sequence(node.kinds[0]) else "mapping"


def _unite(held: Held, path: Path, unbuildable: frozenset[str], conflicts: list[tuple[Path, Held]]) -> Node:
    some = [(node, ranks) for node, ranks in held if not (isinstance(node, Leaf) and node.op == "none")]
    if not some:
        return NONE_LEAF
    if len({_shape(node) for node, _ in some}) > 1:
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
    keys = _in_order(children, base)
    return Container(kinds, keys, tuple(children[key] for key in keys), nullable)


# -- 3. layout --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layout:
    """The tree all ranks agreed on, for one name on one group. ``unbuildable`` kinds are plain dicts in it."""

    root: Node = EMPTY
    unbuildable: frozenset[str] = field(default_factory=frozenset)

    @cached_property
    def size(self) -> int:
        """How many slots."""
        return slot_count(self.root)

    @cached_property
    def fingerprint(self) -> bytes:
        """8 bytes that stand for the tree."""
        unbuildable = "\0".join(sorted(self.unbuildable)).encode("utf-8", "surrogatepass")
        return fingerprint(encode_schema(self.root) + unbuildable)

    @cached_property
    def specials(self) -> tuple[tuple[int, str], ...]:
        """(slot, reduce op) of every value slot that is not a mean."""
        found: list[tuple[int, str]] = []
        _find_specials(self.root, 0, found)
        return tuple(found)

    @cached_property
    def extremes(self) -> dict[int, str]:
        """Slot -> "min" or "max", in order: what the second collective carries."""
        return {slot: op for slot, op in self.specials if op in ("min", "max")}

    @cached_property
    def everything(self) -> Selection:
        """The selection of a call in which every rank held every path."""
        return select(self, None)

    @cached_property
    def names(self) -> dict[int, str]:
        """Slot -> the one spelling of its path, for value slots and for containers that may be None."""
        paths = dict(_named_slots(self.root, 0, ()))
        return dict(zip(paths, unique_names(list(paths.values())), strict=True))


def _find_specials(node: Node, slot: int, found: list[tuple[int, str]]) -> int:
    """Append the specials of the tree that starts at ``slot``; returns the slot after it."""
    if isinstance(node, Leaf):
        if node.op != "mean":
            found.append((slot, node.op))
        return slot + slot_count(node)
    slot += marker_count(node)
    if is_flat(node) and all(isinstance(child, Leaf) and child.op == "mean" for child in set(node.children)):
        return slot + len(node.children)
    for child in node.children:
        slot = _find_specials(child, slot, found)
    return slot


def _named_slots(node: Node, slot: int, path: Path) -> list[tuple[int, Path]]:
    if isinstance(node, Leaf):
        return [(slot, path)]
    named = [(slot, path)] if node.nullable else []
    slot += marker_count(node)
    for key, child in zip(node.keys, node.children, strict=True):
        named += _named_slots(child, slot, (*path, step_into(node, key)))
        slot += slot_count(child)
    return named


# -- 4. place ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Placement:
    """Where one rank's leaves, in the order of its schema, go in a layout.

    ``slots[i]`` is the slot of leaf i; ``codes`` is this rank's codes lane when all its values are finite;
    ``whole`` says that leaf i is slot i, every slot has a leaf, and none is None.
    """

    slots: Sequence[int]
    codes: array[float]
    whole: bool
    stale: bool
    room: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Lanes that say how much room it takes to tell all ranks the schema and its numbers."""


def place(schema: Node, layout: Layout) -> Placement:
    """Place ``schema``; ``stale`` where it holds a path, kind, dtype or reduce op that ``layout`` lacks."""
    if schema == layout.root and not _needs_marks(schema):
        return Placement(range(layout.size), array("d", [PRESENT]) * layout.size, True, False)
    slots, codes = array("q"), array("d", [0.0]) * layout.size
    try:
        _place(schema, layout.root, 0, slots, codes, layout.unbuildable)
    except _Stale:
        return Placement((), array("d"), False, True)
    return Placement(slots, codes, False, False)


class _Stale(Exception):
    pass


def _needs_marks(node: Node) -> bool:
    """Whether the tree has a slot that a plain value does not fill."""
    if isinstance(node, Leaf):
        return node.op == "none" or len(node.dtypes) > 1
    if marker_count(node):
        return True
    return any(map(_needs_marks, set(node.children) if is_flat(node) else node.children))


def _place(
    mine: Node, agreed: Node, slot: int, slots: array[int], codes: array[float], unbuildable: frozenset[str]
) -> None:
    if isinstance(mine, Leaf):
        _place_leaf(mine, agreed, slot, slots, codes)
        return
    if not mine.keys and agreed != NONE_LEAF and _shape(mine) != _shape(agreed):
        return  # an empty root holds no path, so it contradicts nothing
    kind = DICT if mine.kinds[0] in unbuildable else mine.kinds[0]
    if isinstance(agreed, Leaf) or kind not in agreed.kinds:
        raise _Stale
    if len(agreed.kinds) > 1:
        codes[slot + agreed.nullable + agreed.kinds.index(kind)] = PRESENT
    starts = _children_at(agreed, slot + marker_count(agreed))
    for key, child in zip(mine.keys, mine.children, strict=True):
        found = starts.get(key)
        if found is None:
            raise _Stale
        _place(child, found[0], found[1], slots, codes, unbuildable)


def _place_leaf(mine: Leaf, agreed: Node, slot: int, slots: array[int], codes: array[float]) -> None:
    if mine.op == "none":
        if isinstance(agreed, Container) and not agreed.nullable:
            raise _Stale
        codes[slot] = NONE
    else:
        if isinstance(agreed, Container) or agreed.op != mine.op or not set(mine.dtypes) <= set(agreed.dtypes):
            raise _Stale
        codes[slot] = PRESENT
        if len(agreed.dtypes) > 1 and mine.dtypes:
            codes[slot + 1 + agreed.dtypes.index(mine.dtypes[0])] = PRESENT
    slots.append(slot)


def _children_at(node: Container, slot: int) -> dict[Step, tuple[Node, int]]:
    if is_flat(node):
        return dict(zip(node.keys, zip(node.children, range(slot, slot + len(node.keys)), strict=True), strict=True))
    starts: dict[Step, tuple[Node, int]] = {}
    for key, child in zip(node.keys, node.children, strict=True):
        starts[key] = (child, slot)
        slot += slot_count(child)
    return starts


# -- 5. select --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Selection:
    """The shape of one result: which slots it shows, and what the codes lane says of each.

    ``slots`` are the value slots of the result's leaves, in order. ``present`` and ``nonfinite`` count ranks per leaf;
    None stands for "every rank" and "no rank". ``nones`` are positions of leaves that every holder held as None.
    """

    schema: Node
    slots: Sequence[int]
    present: Sequence[int] | None
    nonfinite: Sequence[int] | None
    nones: tuple[int, ...]

    @cached_property
    def position_of(self) -> dict[int, int]:
        """Slot -> its place among the result's leaves."""
        return {slot: position for position, slot in enumerate(self.slots)}

    @cached_property
    def by_dtypes(self) -> dict[tuple[str, ...], Sequence[int]]:
        """The dtypes that ranks hold of a leaf -> the leaves of which that is so; without the `nones`."""
        places: dict[tuple[str, ...], array[int]] = {}
        nones = set(self.nones)
        for place, found in enumerate(leaf_nodes(self.schema)):
            if place not in nones:
                places.setdefault(found.dtypes, array("q")).append(place)
        return dict(places)


def select(layout: Layout, codes: Sequence[float] | None) -> Selection:
    """The paths that some rank held, from the summed ``codes`` lane; None where every rank held every path."""
    if codes is None:
        return Selection(layout.root, range(layout.size), None, None, ())
    schema, slots = prune(layout.root, bytes(map(bool, codes)))
    counts = [int(codes[slot]) for slot in slots]
    nonfinite = [count // NONFINITE & _COUNT for count in counts]
    return Selection(
        schema=schema,
        slots=slots,
        present=[count & _COUNT for count in counts],
        nonfinite=nonfinite if any(nonfinite) else None,
        nones=tuple(i for i, count in enumerate(counts) if count % NONE == 0),
    )


def prune(root: Node, held: bytes) -> tuple[Node, array[int]]:
    """The tree without the slots where ``held`` is 0, and the value slots that remain, in order."""
    slots = array("q")
    node = _prune(root, 0, held, slots)
    if node is not None:
        return node, slots
    return (EMPTY if isinstance(root, Leaf) else Container(_held_kinds(root, 0, held), (), ())), slots


def _prune(node: Node, slot: int, held: bytes, slots: array[int]) -> Node | None:
    if isinstance(node, Leaf):
        if not held[slot]:
            return None
        slots.append(slot)
        return leaf(node.op, _narrowed(node.dtypes, held[slot + 1 :])) if len(node.dtypes) > 1 else node
    none_here = node.nullable and bool(held[slot])
    none_slot, kinds = slot, _held_kinds(node, slot, held)
    slot += marker_count(node)
    if is_flat(node):
        mask = held[slot : slot + len(node.keys)]
        slots.extend(compress(range(slot, slot + len(node.keys)), mask))
        keys, children = tuple(compress(node.keys, mask)), tuple(compress(node.children, mask))
    else:
        keys, children = _prune_children(node, slot, held, slots)
    if keys:
        return Container(kinds, keys, children, none_here)
    if none_here:
        slots.append(none_slot)
        return NONE_LEAF
    return None


def _prune_children(
    node: Container, slot: int, held: bytes, slots: array[int]
) -> tuple[tuple[Step, ...], tuple[Node, ...]]:
    kept: dict[Step, Node] = {}
    for key, child in zip(node.keys, node.children, strict=True):
        size = slot_count(child)
        if any(held[slot : slot + size]):
            remaining = _prune(child, slot, held, slots)
            if remaining is not None:
                kept[key] = remaining
        slot += size
    return tuple(kept), tuple(kept.values())


def _held_kinds(node: Container, slot: int, held: bytes) -> tuple[str, ...]:
    return _narrowed(node.kinds, held[slot + node.nullable :]) if len(node.kinds) > 1 else node.kinds


def _narrowed(tags: tuple[str, ...], held: bytes) -> tuple[str, ...]:
    return tuple(compress(tags, held)) or tags


def result_kinds(root: Node) -> set[str]:
    """Every kind that a result of this layout may have to construct."""
    if isinstance(root, Leaf):
        return set()
    kinds = {*root.kinds, common_kind(root.kinds)}
    if not is_flat(root):
        kinds.update(*map(result_kinds, root.children))
    return kinds
