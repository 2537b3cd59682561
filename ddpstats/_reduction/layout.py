"""The layout that all ranks agreed on for one name: a flat map from leaf to slot. Pure functions of plain values.

1. `Layout`: the slots, and its fingerprint. A leaf has one slot, which is three lanes of the buffer: a weighted sum, a
   weight and a code that counts ranks. A tag (the kind of a container, a dtype) has a code alone.
2. `place`: where one rank's leaves go in a layout; nowhere if it holds what the layout lacks: it is stale.
3. `select`: which leaves some rank held in a call, read from the codes, and how the result is nested.
4. `agree`: from what each rank holds to a layout for all, or to one `SchemaConflict` for all.

Each rank runs them on the same values and comes to the same end.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from ddpstats._base.paths import Path, Step, format_path, unique_names
from ddpstats._base.text import count_of, holders_lines
from ddpstats._ranks.exchange import fingerprint
from ddpstats._reduction.flatten import CONTAINERS, DICT, DTYPE_TAGS, LIST, LeafKey, Structure, Tag
from ddpstats._reduction.ops import NONE, OPS
from ddpstats.errors import SchemaConflict

# The code of a slot counts three things over ranks in one float64, exact for fewer than 2**17 ranks.
PRESENT, NONFINITE, IS_NONE = 1, 1 << 17, 1 << 34
_COUNT = (1 << 17) - 1

# A layout may have this many slots, or twice as many as ranks hold, before what no rank holds is dropped.
_KEPT_UNUSED = 1024
_SHOWN_CONFLICTS = 5

# -- 1. layout --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layout:
    """The leaves and tags that all ranks agreed on, for one name on one group."""

    leaves: tuple[LeafKey, ...] = ()
    tags: tuple[Tag, ...] = ()

    @cached_property
    def size(self) -> int:
        """The number of leaves, which is the number of slots."""
        return len(self.leaves)

    @cached_property
    def codes(self) -> int:
        """The number of codes: of leaves, then of tags."""
        return len(self.leaves) + len(self.tags)

    @cached_property
    def fingerprint(self) -> bytes:
        """The bytes that stand for the layout."""
        return fingerprint(repr((self.leaves, self.tags)).encode("utf-8", "surrogatepass"))

    @cached_property
    def slot_of(self) -> dict[LeafKey, int]:
        return {key: slot for slot, key in enumerate(self.leaves)}

    @cached_property
    def code_of_tag(self) -> dict[Tag, int]:
        return {tag: self.size + index for index, tag in enumerate(self.tags)}

    @cached_property
    def special(self) -> dict[int, str]:
        """Slot -> op of every leaf that is not a mean."""
        return {slot: op for slot, (_, op) in enumerate(self.leaves) if op != "mean"}

    @cached_property
    def extremes(self) -> dict[int, str]:
        """Slot -> "min" or "max", in order: what the second collective carries."""
        return {slot: OPS[op].over for slot, op in self.special.items() if OPS[op].over != "sum"}

    @cached_property
    def everything(self) -> Selection:
        """The selection of a call in which every rank held every leaf."""
        return select(self, None)

    @cached_property
    def names(self) -> list[str]:
        """Return the one spelling of the path of each slot."""
        paths = list(dict.fromkeys(path for path, _ in self.leaves))
        name_of = dict(zip(paths, unique_names(paths), strict=True))
        return [name_of[path] for path, _ in self.leaves]


# -- 2. place ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Placement:
    """The slots of one rank's leaves in a layout.

    Attributes:
        slots: the slot of each leaf; a range where they follow each other.
        codes: this rank's codes when all its values are finite.
        is_complete: this rank holds every leaf and every tag, and no leaf is None.
        last: the last weight of a call whose leaves all have it, with all weights and codes in the order of the slots.
    """

    slots: range | array[int]
    codes: array[float]
    is_complete: bool
    last: tuple[float, array[float]] = math.nan, array("d")


def place(structure: Structure, layout: Layout) -> Placement | None:
    """Place the leaves of ``structure`` in ``layout``; None, for a stale rank, where that lacks a leaf or a tag."""
    has_none = any(op == NONE.name for _, op in structure.leaves)
    is_complete = len(structure.leaves) == layout.size and len(structure.tags) == len(layout.tags) and not has_none
    try:
        slots = array("q", map(layout.slot_of.__getitem__, structure.leaves))
        tags = [layout.code_of_tag[tag] for tag in structure.tags]
    except KeyError:
        return None
    codes = array("d", bytes(8 * layout.codes))
    for slot, (_, op) in zip(slots, structure.leaves, strict=True):
        codes[slot] = IS_NONE if op == NONE.name else PRESENT
    for index in tags:
        codes[index] = PRESENT
    return Placement(_as_range(slots), codes, is_complete)


def _as_range(slots: Any) -> Any:
    """Return a range where the slots follow each other, and otherwise ``slots``: a range is copied all at once."""
    first = slots[0] if slots else 0
    in_order = range(first, first + len(slots))
    return in_order if [*slots] == [*in_order] else slots


# -- 3. select --------------------------------------------------------------------------------------------------------

# Takes as many values as a result has leaves, in order, and nests them.
Builder = Callable[[Iterator[Any]], Any]


class _Container(NamedTuple):
    kind: str
    children: dict[Step, Any]  # a _Container, or the slot of a leaf


@dataclass(frozen=True, eq=False)
class Selection:
    """The shape of one result: which leaves it shows, in the order of its values, and how many ranks hold each.

    Attributes:
        layout: what the slots are slots of.
        slots: the slot of each leaf.
        present: how many ranks hold a value of each leaf; None means every rank.
        nonfinite: how many ranks hold a NaN or an infinity; None means no rank.
        root: the leaf or the containers.
        dtypes: path -> dtypes that ranks hold of that leaf; of all leaves under ().
    """

    layout: Layout
    slots: Sequence[int]
    present: Sequence[int] | None
    nonfinite: Sequence[int] | None
    root: Any
    dtypes: dict[Path, tuple[str, ...]]

    @cached_property
    def build(self) -> Builder:
        """Nest values; worked out once, for it runs on every step."""
        return _builder(self.root)

    @cached_property
    def ops(self) -> list[str]:
        return [self.layout.leaves[slot][1] for slot in self.slots]

    @cached_property
    def special(self) -> list[tuple[int, int, str]]:
        """(index, slot, op) of every leaf that is not a mean."""
        special = self.layout.special
        return [(index, slot, special[slot]) for index, slot in enumerate(self.slots) if slot in special]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "build"}  # made of closures


def select(layout: Layout, codes: Sequence[float] | None) -> Selection:
    """Return the leaves that some rank held, from the summed ``codes``; None where every rank held every leaf."""
    held = [slot for slot in range(layout.size) if codes is None or codes[slot]]
    tags: dict[Path, list[str]] = {}
    for tag, index in layout.code_of_tag.items():
        if codes is None or codes[index]:
            tags.setdefault(tag[0], []).append(tag[1])
    kinds = {path: _common_kind(held_tags) for path, held_tags in tags.items()}
    dtypes = {path: tuple(tag for tag in held_tags if tag in DTYPE_TAGS) for path, held_tags in tags.items()}
    root = _nest(layout, _without_hidden_nones(layout, held), kinds)
    slots = _as_range(list(_slots_below(root)))
    if codes is None:
        return Selection(layout, slots, None, None, root, dtypes)
    counts = [int(codes[slot]) for slot in slots]
    nonfinite = [count // NONFINITE & _COUNT for count in counts]
    present = [count & _COUNT for count in counts]
    return Selection(layout, slots, present, nonfinite if any(nonfinite) else None, root, dtypes)


def _common_kind(tags: Iterable[str]) -> str | None:
    kinds = [tag for tag in tags if tag in CONTAINERS]
    return None if not kinds else kinds[0] if len(kinds) == 1 else LIST


def _without_hidden_nones(layout: Layout, held: list[int]) -> list[int]:
    """Leave out each None where another rank holds a value or a container."""
    nones = {slot: layout.leaves[slot][0] for slot in held if layout.special.get(slot) == NONE.name}
    if not nones:
        return held
    filled = set[Path]()  # paths of values, of None below them, and of the containers around both
    for slot in held:
        path, op = layout.leaves[slot]
        filled.update(path[:length] for length in range(len(path) + (op != NONE.name)))
    return [slot for slot in held if slot not in nones or nones[slot] not in filled]


def _nest(layout: Layout, slots: list[int], kinds: dict[Path, str | None]) -> Any:
    """Return the slot of a leaf at the root, or containers of slots."""
    if slots and not layout.leaves[slots[0]][0]:
        return slots[0]
    containers: dict[Path, _Container] = {(): _Container(kinds.get(()) or DICT, {})}

    def container(path: Path) -> _Container:
        known = containers.get(path)
        if known is None:
            known = containers[path] = _Container(kinds.get(path) or DICT, {})
            container(path[:-1]).children[path[-1]] = known
        return known

    for slot in slots:
        path = layout.leaves[slot][0]
        container(path[:-1]).children[path[-1]] = slot
    return containers[()]


def _in_order(node: _Container) -> Iterable[tuple[Step, Any]]:
    items = node.children.items()
    return items if node.kind == DICT else sorted(items, key=lambda item: item[0])


def _slots_below(node: Any) -> Iterator[int]:
    if isinstance(node, int):
        yield node
        return
    for _, child in _in_order(node):
        yield from _slots_below(child)


def _builder(node: Any) -> Builder:
    if isinstance(node, int):
        return next
    keys, children = [key for key, _ in _in_order(node)], [child for _, child in _in_order(node)]
    is_flat = all(isinstance(child, int) for child in children)
    builders, template = [_builder(child) for child in children], dict.fromkeys(keys)

    def build(values: Iterator[Any]) -> Any:
        held = values if is_flat else (below(values) for below in builders)
        if node.kind == DICT:
            made = template.copy()  # a quarter faster than making one from pairs
            made.update(zip(keys, held, strict=False))  # takes no more values than there are keys
            return made
        filled = _fill(keys, list(islice(held, len(keys))))
        return filled if node.kind == LIST else tuple(filled)

    return build


def _fill(positions: Sequence[Step], values: list[Any]) -> list[Any]:
    """Return ``values`` at their positions; one that no rank filled (an empty dict in a list, say) is None."""
    if not positions or positions[-1] == len(positions) - 1:
        return values
    filled: list[Any] = [None] * (int(positions[-1]) + 1)
    for position, value in zip(positions, values, strict=True):
        filled[int(position)] = value
    return filled


# -- 4. agree ---------------------------------------------------------------------------------------------------------

# Each distinct structure with the global ranks that hold it, in the order of the ranks.
Held = Sequence[tuple[Structure, tuple[int, ...]]]

_MAPPING, _SEQUENCE = "mapping", "sequence"


def agree(held: Held, base: Layout, group_name: str) -> Layout:
    """Return the layout of all leaves of this call, beside those of ``base``. Raises `SchemaConflict`.

    What this call contradicts is dropped from ``base``; all of it, where it is much more than the ranks hold.
    """
    sorts: dict[Path, str] = {}
    conflicts: list[Path] = []
    for structure, _ in held:
        own = sorts_of(structure).items()
        conflicts += [path for path, sort in own if sorts.setdefault(path, sort) != sort]
    if conflicts:
        raise _conflict_error(list(dict.fromkeys(conflicts)), held, group_name)
    leaves = dict.fromkeys(key for structure, _ in held for key in structure.leaves)
    tags = dict.fromkeys(tag for structure, _ in held for tag in structure.tags)
    if base.codes > max(_KEPT_UNUSED, 2 * (len(leaves) + len(tags))):
        return Layout(tuple(leaves), tuple(tags))
    base_sorts = sorts_of(base)
    contradicted = {path for path, sort in sorts.items() if base_sorts.get(path, sort) != sort}
    kept, kept_tags = base.leaves, base.tags
    if contradicted:
        kept = tuple(key for key in kept if not _is_at_or_below(key[0], contradicted))
        kept_tags = tuple(tag for tag in kept_tags if not _is_at_or_below(tag[0], contradicted))
    return Layout(tuple(dict.fromkeys((*kept, *leaves))), tuple(dict.fromkeys((*kept_tags, *tags))))


def sorts_of(holder: Structure | Layout) -> dict[Path, str]:
    """Return what each path is: an op, a mapping or a sequence; paths that are None are left out."""
    sorts = {path: op for path, op in holder.leaves if op != NONE.name}
    for path, tag in holder.tags:
        if tag in CONTAINERS:
            sorts[path] = _MAPPING if tag == DICT else _SEQUENCE
    return sorts


def _is_at_or_below(path: Path, paths: set[Path]) -> bool:
    return any(path[:length] in paths for length in range(len(path) + 1))


def _conflict_error(conflicts: list[Path], held: Held, group_name: str) -> SchemaConflict:
    shown = [path for path in conflicts if not path or not _is_at_or_below(path[:-1], set(conflicts))]
    lines: list[str] = []
    involved: set[int] = set()
    for number, path in enumerate(shown):
        described = [(describe(structure, path), ranks) for structure, ranks in held]
        by_rank = {rank: what for what, ranks in described if what is not None for rank in ranks}
        involved.update(by_rank)
        if number < _SHOWN_CONFLICTS:
            what = f"different things under {format_path(path)!r}" if path else "different stats"
            lines.append(f"ranks of {group_name} hold {what}:")
            lines += holders_lines(by_rank)
    if len(shown) > _SHOWN_CONFLICTS:
        lines.append(f"and {len(shown) - _SHOWN_CONFLICTS} more paths")
    lines.append(
        "Give each path one structure and one reduce op on all ranks, or use different keys. Nothing was reduced."
    )
    return SchemaConflict("\n".join(lines), ranks=involved, path=format_path(shown[0]) or None, group=group_name)


def describe(structure: Structure, path: Path) -> str | None:
    """Say what a rank holds at ``path``, in the words of an error message; None where it holds nothing."""
    ops = [op for key, op in structure.leaves if key == path]
    if ops:
        return "None" if ops[0] == NONE.name else f"a leaf ({ops[0]})"
    kind = next((tag for key, tag in structure.tags if key == path and tag in CONTAINERS), None)
    if kind is None:
        return None
    keys = list(dict.fromkeys(key[len(path)] for key, _ in structure.leaves if key[: len(path)] == path))
    shown = ", ".join(repr(key) for key in keys[:4])
    return f"a {kind} with {count_of(len(keys), 'entries')} ({shown}{', ...' if len(keys) > 4 else ''})"
