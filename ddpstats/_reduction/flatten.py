"""Split nested stats into leaves and a `Structure` that says which path and op each leaf has.

`flatten` runs on every step, so what it learns of a tree is kept by the tree's *signature*: the keys and the types of
everything in it, taken at C speed. Equal signatures have equal structures; only a new one is walked leaf by leaf.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from ddpstats._base.caches import EmptiedCache
from ddpstats._base.files import parse_json
from ddpstats._base.paths import Index, Path, Step
from ddpstats._base.text import dtype_name
from ddpstats._ranks.exchange import InvalidLeaf, refuse
from ddpstats._reduction.ops import MARKERS, MEAN, NONE, OPS, Marker, Op

# The path of a leaf and the name of its op; "none" for a leaf that is None.
LeafKey = tuple[Path, str]

# The path of a container and its kind; or the path of leaves ("()" for all of them) and their dtype.
Tag = tuple[Path, str]

DICT, LIST, TUPLE = "dict", "list", "tuple"
CONTAINERS = (DICT, LIST, TUPLE)
# The floating dtypes a result may have; any other one is reported as the nearest of these.
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
DTYPE_TAGS = (*FLOATS, "default")

MAX_DEPTH = 100
_MAX_KEY_BITS = 1024

# How values are read: all Python numbers; all tensors; a mix of the two; or leaf by leaf (markers, numpy, None).
Reading = Literal["numbers", "tensors", "plain", "general"]


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """All that a signature determines: what a rank holds under which path, and how to read the values of its leaves.

    Attributes:
        leaves: one key for each leaf, in the order of the leaves.
        tags: the kind of each container that has a leaf, and the dtypes of leaves where the caller asked for them.
    """

    leaves: tuple[LeafKey, ...]
    tags: tuple[Tag, ...]
    reading: Reading = "general"

    @cached_property
    def encoded(self) -> str:
        """The structure as other ranks read it (`decode`): JSON without nesting, whatever the stats are."""
        return json.dumps([self.tags, self.leaves], separators=(",", ":"))

    @cached_property
    def ops(self) -> list[Op]:
        return [OPS[op] for _, op in self.leaves]


class Flat(NamedTuple):
    """One rank's stats, flattened: ``leaves[i]`` belongs to ``structure.leaves[i]``."""

    structure: Structure
    leaves: list[Any]


NUMBERS: frozenset[type] = frozenset({float, int, bool})
_ATOMS: set[type] = {float, int, bool, torch.Tensor, type(None)}  # types known to be leaves
INTERCHANGEABLE = NUMBERS | {torch.Tensor}
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_SEQUENCES = frozenset({list, tuple})

# A million generated names over a run must not stay here: at most this many structures and leaves.
_structures: EmptiedCache[Hashable, Structure] = EmptiedCache(max_entries=128, max_cost=262_144)


def flatten(stats: Any, keep_dtypes: bool = False) -> Flat:
    """Flatten ``stats``. Local. Raises `InvalidLeaf` for a key, type or depth that cannot be reduced."""
    if type(stats) is dict:
        recent = _recent.get((len(stats), keep_dtypes))
        if recent is not None and [*stats] == recent.keys:
            leaves = [*stats.values()]
            if recent.types == {*map(type, leaves)} and (
                not keep_dtypes or recent.dtypes == {*map(_tensor_dtype, leaves)}
            ):
                return Flat(recent.structure, leaves)
    return _flatten_any(stats, keep_dtypes)


def _flatten_any(stats: Any, keep_dtypes: bool) -> Flat:
    leaves: list[Any] = []
    try:
        signature: Any = _signature(stats, leaves, 0)
    except _Unfamiliar:
        return _walk(stats, keep_dtypes)
    dtypes = _dtypes_key(leaves) if keep_dtypes else None
    key = signature, dtypes
    known = _structures.get(key)
    if known is None:
        flat = _walk(stats, keep_dtypes)
        known, leaves = _structures.keep(key, flat.structure, len(leaves) + 1), flat.leaves
    is_flat = type(stats) is dict and len(signature) == 4 and _are_str(signature[1])
    if is_flat and (not keep_dtypes or isinstance(dtypes, torch.dtype)):
        _, keys, count, types = signature
        _recent.keep((count, keep_dtypes), _Recent([*keys], types, frozenset([dtypes]), known), count + 1)
    return Flat(known, leaves)


# -- the fastest look -------------------------------------------------------------------------------------------------


class _Recent(NamedTuple):
    """A flat dict of plain values with str keys. To compare its keys costs less than to hash them."""

    keys: list[Any]
    types: frozenset[type]
    dtypes: frozenset[Any]
    structure: Structure


# By number of keys, and whether dtypes count (then all are tensors of one dtype): the last such dict.
_recent: EmptiedCache[tuple[int, bool], _Recent] = EmptiedCache(max_entries=16, max_cost=262_144)


# -- the fast look ----------------------------------------------------------------------------------------------------


class _Unfamiliar(Exception):
    """Raised for what the signature does not cover: the careful walk decides."""


def _signature(stats: Any, leaves: list[Any], depth: int) -> Hashable:
    """Return keys and types of the whole tree; the leaves are appended to ``leaves`` on the way."""
    kind = type(stats)
    if kind in _MAPPINGS:
        keys, values = tuple(stats), tuple(stats.values())
        if not _are_str(keys):  # 1, True and 1.0 are equal as keys, but not the same key
            keys = (keys, tuple(map(type, keys)))
    elif kind in _SEQUENCES:
        keys, values = (), tuple(stats)
    elif kind in _ATOMS:
        leaves.append(stats)
        return _atom(stats)
    else:
        raise _Unfamiliar
    if depth > MAX_DEPTH:
        raise _Unfamiliar
    types = frozenset(map(type, values))
    if not types <= _ATOMS:
        return kind, keys, tuple([_signature(value, leaves, depth + 1) for value in values])
    leaves += values
    if types <= INTERCHANGEABLE:  # which of them is where makes no difference, so one set does for all
        return kind, keys, len(values), types
    return kind, keys, tuple(map(_atom, values))


def _are_str(keys: tuple[Any, ...]) -> bool:
    try:
        "".join(keys)  # refuses all other types, and is four times as fast as looking at the types
    except TypeError:
        return False
    return True


def _atom(value: Any) -> Hashable:
    """Return a leaf's part of the signature: a marker around None differs from one around a value."""
    kind: type = type(value)
    return (kind, value.value is None) if isinstance(value, Marker) else kind


_tensor_dtype = attrgetter("dtype")


def _dtypes_key(leaves: list[Any]) -> Hashable:
    """Return the dtypes' part of a signature: one for all, or one per leaf."""
    if {*map(type, leaves)} == {torch.Tensor}:
        different = {*map(_tensor_dtype, leaves)}
        return different.pop() if len(different) == 1 else tuple(map(_tensor_dtype, leaves))
    return tuple(map(_dtype_of, leaves))


def _dtype_of(value: Any) -> str:
    """The leaf's floating dtype; "default" for Python numbers, integers and bools, which take torch's default dtype."""
    dtype = getattr(value.value if isinstance(value, Marker) else value, "dtype", None)
    name = dtype_name(dtype)
    if name in FLOATS:
        return name
    return "float32" if isinstance(dtype, torch.dtype) and dtype.is_floating_point else "default"


# -- the careful walk -------------------------------------------------------------------------------------------------


def _walk(stats: Any, keep_dtypes: bool) -> Flat:
    values: list[Any] = []
    leaves: list[LeafKey] = []
    tags: list[Tag] = []
    _visit(stats, (), values, leaves, tags, set())
    reading = _reading(values)
    if not keep_dtypes:
        return Flat(Structure(tuple(leaves), tuple(tags), reading), values)
    dtypes = [_dtype_of(value) for value, (_, op) in zip(values, leaves, strict=True) if op != NONE.name]
    paths = [path for path, op in leaves if op != NONE.name]
    if len(set(dtypes)) == 1:
        tags.append(((), dtypes[0]))
    else:
        tags += zip(paths, dtypes, strict=True)
    return Flat(Structure(tuple(leaves), tuple(tags), reading), values)


def _visit(value: Any, path: Path, values: list[Any], leaves: list[LeafKey], tags: list[Tag], above: set[int]) -> None:
    """Append the leaves of ``value`` and the tags of its containers; a container without leaves has no tag."""
    described = _kind_and_items(value)
    if described is None:
        leaves.append((path, _check_op(value, path)))
        values.append(value)
        return
    kind, items = described
    if id(value) in above:
        raise InvalidLeaf(path, "the structure contains itself")
    if len(path) >= MAX_DEPTH:
        raise InvalidLeaf(path[:8], f"nested more than {MAX_DEPTH} deep below this path")
    above.add(id(value))
    count, tag = len(leaves), len(tags)
    steps: set[Step] = set()
    for key, child in items:
        step = Index(key) if kind != DICT else _check_key(key, path)
        if step in steps:
            raise InvalidLeaf((*path, step), "two keys of this dict are equal once they are plain str or int")
        steps.add(step)
        _visit(child, (*path, step), values, leaves, tags, above)
    above.discard(id(value))
    if len(leaves) > count:
        tags.insert(tag, (path, kind))


def _check_op(value: Any, path: Path) -> str:
    """Return the name of the leaf's op. Raises `InvalidLeaf` for a type that is no leaf."""
    inner = value.value if isinstance(value, Marker) else value
    if inner is None:
        return NONE.name
    if not isinstance(inner, torch.Tensor) and not hasattr(inner, "__float__") and not is_numpy(inner):
        leaves = f"a real number, a tensor, None, or one of the markers {MARKERS}"
        raise InvalidLeaf(path, f"{_type_name(inner)} is not a leaf; a leaf is {leaves}")
    if isinstance(value, torch.Tensor | Marker) or is_numpy(value):
        _ATOMS.add(type(value))
    return (value.op if isinstance(value, Marker) else MEAN).name


def is_numpy(value: Any) -> bool:
    """Return whether ``value`` is an array or a scalar of numpy."""
    numpy = sys.modules.get("numpy")  # never imported for this: who holds an array has imported it
    return numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray))


def _check_key(key: Any, path: Path) -> Step:
    if isinstance(key, str):
        return key if type(key) is str else str.__str__(key)
    if isinstance(key, int):
        number = int(key)
        if number.bit_length() > _MAX_KEY_BITS:  # Python itself refuses to print integers of some thousand digits
            raise InvalidLeaf(path, f"an int key of {number.bit_length()} bits; at most {_MAX_KEY_BITS} are allowed")
        return number
    shown = repr(key)[:60]
    raise InvalidLeaf((*path, shown), f"the key {shown} is of type {_type_name(key)}; a key is a str or an int")


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _kind_and_items(value: Any) -> tuple[str, Iterable[tuple[Any, Any]]] | None:
    """Return what container ``value`` is and its items, or None for a leaf."""
    if isinstance(value, Marker):
        return None
    if isinstance(value, Mapping):
        return DICT, value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return DICT, zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple):
        return (LIST if isinstance(value, list) else TUPLE), enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return DICT, ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return None


def _reading(values: list[Any]) -> Reading:
    types = set(map(type, values))
    if types <= NUMBERS:
        return "numbers"
    if types == {torch.Tensor}:
        return "tensors"
    return "plain" if types <= INTERCHANGEABLE else "general"


# -- what other ranks sent --------------------------------------------------------------------------------------------

_MAX_POSITION = 1 << 24  # a result holds a list as long as the last position
_Pairs = list[tuple[list[str | int], str]]


def decode(payload: str | bytes) -> Structure:
    """Read what `Structure.encoded` of another rank wrote. Raises `ProtocolMismatch` if the bytes are not that."""
    schema: tuple[_Pairs, _Pairs]
    try:
        schema = msgspec.convert(parse_json(payload), tuple[_Pairs, _Pairs])
    except ValueError as error:
        refuse(f"a schema that is not one: {str(error)[:200]}")
    kinds: dict[Path, str] = {}
    tags, leaves = list[Tag](), list[LeafKey]()
    for steps, tag in schema[0]:
        path = _check_path(steps, kinds)
        if tag in CONTAINERS and path not in kinds:
            kinds[path] = tag
        elif tag not in DTYPE_TAGS:
            refuse(f"the tag {tag[:40]!r}")
        tags.append((path, tag))
    for steps, op in schema[1]:
        path = _check_path(steps, kinds)
        if op not in OPS or path in kinds:
            refuse(f"a leaf of op {op[:40]!r}, which this rank does not know")
        leaves.append((path, op))
    if len({path for path, _ in leaves}) != len(leaves):
        refuse("two leaves with one path")
    return Structure(tuple(leaves), tuple(tags))


def _check_path(steps: list[str | int], kinds: Mapping[Path, str]) -> Path:
    """Return the path of these steps; ``kinds`` has the containers that came before."""
    if len(steps) > MAX_DEPTH:
        refuse(f"a structure deeper than {MAX_DEPTH}")
    path: Path = ()
    for step in steps:
        kind = kinds.get(path)
        if kind in (LIST, TUPLE) and isinstance(step, int) and 0 <= step < _MAX_POSITION:
            path = (*path, Index(step))
        elif kind == DICT:
            path = (*path, step)
        else:
            refuse("a key or position that is none")
    return path
