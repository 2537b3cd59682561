"""What one rank holds, without the values: a tree of ``Leaf`` and ``Container``.

The same two node types describe a rank's stats (a schema), what the ranks agreed on (the root of a Layout) and what a
result looks like, so that one set of functions walks them all.

Slots are the lanes of the reduction buffer that a tree owns, numbered depth first:

- a leaf owns one slot for its value, and one marker slot per dtype where ranks were seen to hold several dtypes;
- a container owns one marker slot for "None here" where that was seen, one per kind where ranks were seen to hold
  several kinds (list and tuple), and then the slots of its children.

Marker slots let every single call find out what its ranks hold, without a renegotiation when that changes back and
forth.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from ddpstats._base.paths import Index, Path, Step
from ddpstats._reduction.markers import ReduceOp

LeafOp = ReduceOp | Literal["none"]
OPS: tuple[LeafOp, ...] = ("none", "mean", "sum", "min", "max", "any", "all")

MAX_DEPTH = 100

DICT, ORDERED_DICT, LIST, TUPLE = "dict", "OrderedDict", "list", "tuple"
# Classes of the user: "namedtuple:module:qualified name", "dataclass:module:qualified name".
NAMEDTUPLE, DATACLASS = "namedtuple:", "dataclass:"


class Leaf(NamedTuple):
    """One value. ``op`` is "none" where only None was seen; ``dtypes`` is empty unless the caller asked for them."""

    op: LeafOp
    dtypes: tuple[str, ...] = ()


class Container(NamedTuple):
    """A mapping or a sequence; ``keys`` of a sequence are ascending positions. One without paths is left out."""

    kinds: tuple[str, ...]
    keys: tuple[Step, ...]
    children: tuple[Node, ...]
    nullable: bool = False


Node: TypeAlias = Leaf | Container

EMPTY = Container((DICT,), (), ())


@lru_cache(maxsize=256)
def leaf(op: LeafOp, dtypes: tuple[str, ...] = ()) -> Leaf:
    """The one Leaf object of this meaning: a flat tree of 100,000 leaves then costs one reference a leaf."""
    return Leaf(op, dtypes)


NONE_LEAF = leaf("none")


def is_kind(kind: str) -> bool:
    """Whether some rank's stats can have a container of this kind."""
    return kind in (DICT, ORDERED_DICT, LIST, TUPLE) or (
        kind.startswith((NAMEDTUPLE, DATACLASS)) and kind.count(":") >= 2
    )


def is_sequence(kind: str) -> bool:
    return kind in (LIST, TUPLE)


def common_kind(kinds: tuple[str, ...]) -> str:
    """The kind of the result: the one all ranks hold, else the plain one that every rank can build."""
    if len(kinds) == 1:
        return kinds[0]
    return LIST if is_sequence(kinds[0]) else DICT


def marker_count(node: Node) -> int:
    """How many marker slots the node itself owns."""
    if isinstance(node, Leaf):
        return len(node.dtypes) if len(node.dtypes) > 1 else 0
    return node.nullable + (len(node.kinds) if len(node.kinds) > 1 else 0)


def is_flat(node: Container) -> bool:
    """Whether the children are leaves that own one slot each: the shape that deserves C-speed paths."""
    leaves = distinct_leaves(node)
    return leaves is not None and all(len(leaf.dtypes) < 2 for leaf in leaves)


def distinct_leaves(node: Container) -> set[Leaf] | None:
    """The children, each once; None where not all are leaves."""
    first = node.children[0] if node.children else None
    if type(first) is Leaf and node.children.count(first) == len(node.children):
        return {first}  # one object, as `leaf` makes them: many of them are counted faster than hashed
    if {*map(type, node.children)} - {Leaf}:
        return None
    return {child for child in node.children if isinstance(child, Leaf)}


def slot_count(node: Node) -> int:
    if isinstance(node, Leaf):
        return 1 + marker_count(node)
    own = marker_count(node)
    return own + (len(node.children) if is_flat(node) else sum(map(slot_count, node.children)))


def step_into(node: Container, key: Step) -> Step:
    """The step of a path that leads to the child at ``key``."""
    return Index(key) if isinstance(key, int) and is_sequence(node.kinds[0]) else key


def iter_leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """Every leaf with its path, depth first: the order of values in a result."""
    return ((where, found) for where, found in iter_nodes(node, path) if isinstance(found, Leaf))


def iter_nodes(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every node with its path, containers before what they hold."""
    yield path, node
    if isinstance(node, Leaf):
        return
    sequence = is_sequence(node.kinds[0])
    for key, child in zip(node.keys, node.children, strict=True):
        step = Index(key) if sequence and isinstance(key, int) else key
        if type(child) is Leaf:
            yield (*path, step), child
        else:
            yield from iter_nodes(child, (*path, step))


def leaf_nodes(node: Node) -> Iterator[Leaf]:
    """The leaves alone, in the order of `iter_leaves`."""
    if isinstance(node, Leaf):
        yield node
        return
    for child in node.children:
        if type(child) is Leaf:
            yield child
        else:
            yield from leaf_nodes(child)


def iter_slots(node: Node, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Every slot in order, as (path, role): "value", "none", "kind list", "dtype float32"."""
    if isinstance(node, Leaf):
        yield path, "value"
        if len(node.dtypes) > 1:
            yield from ((path, f"dtype {dtype}") for dtype in node.dtypes)
        return
    if node.nullable:
        yield path, "none"
    if len(node.kinds) > 1:
        yield from ((path, f"kind {kind}") for kind in node.kinds)
    for key, child in zip(node.keys, node.children, strict=True):
        yield from iter_slots(child, (*path, step_into(node, key)))


def describe(node: Node) -> str:
    """One node in the words of an error message."""
    if isinstance(node, Leaf):
        return "None" if node.op == "none" else f"a leaf ({node.op})"
    kind = "/".join(kind.rsplit(":", 1)[-1] for kind in node.kinds)
    shown = ", ".join(repr(key) for key in node.keys[:4])
    return f"a {kind} with {len(node.keys)} entries ({shown}{', ...' if len(node.keys) > 4 else ''})"


def shape_of(node: Node) -> str:
    """What must be alike on all ranks that hold a path."""
    if isinstance(node, Leaf):
        return f"leaf {node.op}"
    return "sequence" if is_sequence(node.kinds[0]) else "mapping"
