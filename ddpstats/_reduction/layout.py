"""What all ranks agreed on, and what a call makes of it. Pure functions of plain values.

1. `Layout`: the tree with its slots numbered, its fingerprint, and the slots that are not plain means.
2. `place`: where one rank's leaves go in a layout; ``stale`` if it holds what the layout lacks.
3. `select`: which paths some rank held in a call, read from the codes lane: the shape of the result.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress

from ddpstats._base.paths import Step, unique_names
from ddpstats._ranks.codec import fingerprint
from ddpstats._reduction.schema import (
    DICT,
    EMPTY,
    NONE_LEAF,
    Container,
    Leaf,
    Node,
    common_kind,
    distinct_leaves,
    is_flat,
    iter_slots,
    leaf,
    leaf_nodes,
    marker_count,
    shape_of,
    slot_count,
)
from ddpstats._reduction.wire import encode_schema

# The codes lane of a slot counts three things over ranks in one float64, exact for fewer than 2**17 ranks.
PRESENT, NONFINITE, NONE = 1, 1 << 17, 1 << 34
_COUNT = (1 << 17) - 1

# -- 1. layout --------------------------------------------------------------------------------------------------------


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
    def slot_of(self) -> dict[Step, int] | None:
        """Key -> slot, where the tree is flat: looked up for every new structure that a rank holds."""
        root = self.root
        if isinstance(root, Leaf) or not is_flat(root):
            return None
        return dict(zip(root.keys, range(marker_count(root), self.size), strict=True))

    @cached_property
    def names(self) -> dict[int, str]:
        """Slot -> the one spelling of its path, for value slots and for containers that may be None."""
        paths = {slot: path for slot, (path, role) in enumerate(iter_slots(self.root)) if role in ("value", "none")}
        return dict(zip(paths, unique_names(list(paths.values())), strict=True))


def _find_specials(node: Node, slot: int, found: list[tuple[int, str]]) -> int:
    """Append the specials of the tree that starts at ``slot``; returns the slot after it."""
    if isinstance(node, Leaf):
        if node.op != "mean":
            found.append((slot, node.op))
        return slot + slot_count(node)
    slot += marker_count(node)
    if is_flat(node) and all(each.op == "mean" for each in distinct_leaves(node) or ()):
        return slot + len(node.children)
    for child in node.children:
        slot = _find_specials(child, slot, found)
    return slot


# -- 2. place ---------------------------------------------------------------------------------------------------------


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
        _place(schema, layout.root, 0, slots, codes, layout)
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
    return any(map(_needs_marks, distinct_leaves(node) or node.children))


def _place(mine: Node, agreed: Node, slot: int, slots: array[int], codes: array[float], layout: Layout) -> None:
    if isinstance(mine, Leaf):
        _place_leaf(mine, agreed, slot, slots, codes)
        return
    if not mine.keys and agreed != NONE_LEAF and shape_of(mine) != shape_of(agreed):
        return  # an empty root holds no path, so it contradicts nothing
    kind = DICT if mine.kinds[0] in layout.unbuildable else mine.kinds[0]
    if isinstance(agreed, Leaf) or kind not in agreed.kinds:
        raise _Stale
    if len(agreed.kinds) > 1:
        codes[slot + agreed.nullable + agreed.kinds.index(kind)] = PRESENT
    if agreed is layout.root and layout.slot_of is not None:
        _place_flat(mine, agreed, layout.slot_of, slots, codes, layout)
        return
    starts = _children_at(agreed, slot + marker_count(agreed))
    for key, child in zip(mine.keys, mine.children, strict=True):
        found = starts.get(key)
        if found is None:
            raise _Stale
        _place(child, found[0], found[1], slots, codes, layout)


def _place_flat(
    mine: Container,
    agreed: Container,
    slot_of: dict[Step, int],
    slots: array[int],
    codes: array[float],
    layout: Layout,
) -> None:
    first = marker_count(agreed)
    for key, child in zip(mine.keys, mine.children, strict=True):
        slot = slot_of.get(key)
        if slot is None:
            raise _Stale
        _place(child, agreed.children[slot - first], slot, slots, codes, layout)


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


# -- 3. select --------------------------------------------------------------------------------------------------------


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
