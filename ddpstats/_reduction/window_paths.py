"""Which paths a window has by now, the slot of each, and one schema of them all.

Only what is new about a structure costs anything: its nodes are compared with what is known of their paths, and schemas
that brought something new are merged some at a time. So keys that come and go, or are generated, stay cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddpstats._base.paths import Path
from ddpstats._reduction.layout_agreement import merge_adds
from ddpstats._reduction.schema import EMPTY, NONE_LEAF, Leaf, Node, iter_leaves, iter_nodes, shape_of
from ddpstats._reduction.tree import Structure

_MOST_SCHEMAS = 64
WEIGHT_SLOT = 0
"""Of the weights of the adds themselves."""


class Placed(NamedTuple):
    """Where the leaves of a structure go; ``new`` are paths that the window lacks; ``grows``: its schema does."""

    slots: Sequence[int]
    new: tuple[Path, ...] = ()
    grows: bool = True


class WindowPaths:
    """Empty at first."""

    def __init__(self) -> None:
        self.count = 1  # slots
        self._first: Structure | None = None
        self._is_alone = True  # as long as there is one structure, its leaves are its slots, in order
        self._schemas: list[Node] = []
        self._slot_of: dict[Path, int] = {}
        self._known: dict[Path, tuple[str, set[str]]] = {}  # shape, and kinds of containers

    def place(self, structure: Structure) -> Placed:
        """Raises `SchemaConflict` where it does not fit; changes nothing that counts."""
        if self._first is None:
            return Placed(range(1, 1 + structure.leaf_count))
        if self._is_alone and not self._known:
            self._slot_of = {path: 1 + i for i, path in enumerate(_paths(self._first))}
            self._learn(self._first.schema)
        schema = structure.schema
        news = [self._is_new(path, node) for path, node in iter_nodes(schema)]
        if None in news:
            merge_adds(self._merged(), schema)  # raises
        paths = list(_paths(structure))
        new = tuple(path for path in paths if path not in self._slot_of)
        slot_of = {path: self.count + i for i, path in enumerate(new)}
        slots = [slot_of.get(path) or self._slot_of[path] for path in paths]
        return Placed(slots, new, bool(new) or any(news) or not paths)

    def keep(self, structure: Structure, placed: Placed) -> None:
        """Take in what `place` found, before it is called again."""
        if self._first is None:
            self._first, self.count = structure, 1 + structure.leaf_count
            self._schemas = [structure.schema]
            return
        self._is_alone = False
        self._slot_of.update({path: self.count + i for i, path in enumerate(placed.new)})
        self.count += len(placed.new)
        if placed.grows:
            self._schemas.append(structure.schema)
            self._learn(structure.schema)
            if len(self._schemas) > _MOST_SCHEMAS:
                self._merged()

    def structure(self, known: Structure | None) -> tuple[Structure, Sequence[int]]:
        """One of all paths, and the slots of its leaves; ``known`` itself where it is equal."""
        if self._first is None:
            return Structure(EMPTY, "general", 0), ()
        if self._is_alone:
            return self._first, range(1, self.count)
        schema = self._merged()
        slots = [self._slot_of[path] for path, _ in iter_leaves(schema)]
        for structure in (self._first, known):  # these have their place in the layout already
            if structure is not None and structure.schema == schema:
                return structure, slots
        return Structure(schema, "general", len(slots)), slots

    def _merged(self) -> Node:
        if len(self._schemas) > 1:
            self._schemas = [merge_adds(*self._schemas)]
        return self._schemas[0]

    def _is_new(self, path: Path, node: Node) -> bool | None:
        """None where it cannot be."""
        if node == NONE_LEAF or (not isinstance(node, Leaf) and not node.keys):
            return False
        known = self._known.get(path)
        if known is None:
            return True
        if known[0] != shape_of(node):
            return None
        return not isinstance(node, Leaf) and not known[1].issuperset(node.kinds)

    def _learn(self, schema: Node) -> None:
        for path, node in iter_nodes(schema):
            if self._is_new(path, node):
                kinds = self._known.setdefault(path, (shape_of(node), set()))[1]
                kinds.update(() if isinstance(node, Leaf) else node.kinds)


def _paths(structure: Structure) -> Iterator[Path]:
    return (path for path, _ in iter_leaves(structure.schema))
