"""Nested stats to (leaves, structure).

`flatten` runs on every step, so what it learns of a tree is kept by the tree's *signature*: the keys and the types of
everything in it, taken at C speed. Equal signatures have equal structures; only a new one is walked leaf by leaf.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from datetime import timedelta
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch

from ddpstats._base.caches import BoundedCache
from ddpstats._base.paths import Index, Path, Step, format_path
from ddpstats._base.text import dtype_name
from ddpstats._ranks.status import Failure
from ddpstats._reduction.markers import Marker
from ddpstats._reduction.nesting import remember_class
from ddpstats._reduction.schema import (
    DATACLASS,
    DICT,
    LIST,
    MAX_DEPTH,
    NAMEDTUPLE,
    NONE_LEAF,
    ORDERED_DICT,
    TUPLE,
    Container,
    Leaf,
    Node,
    is_sequence,
    leaf,
)
from ddpstats._reduction.wire import encode_schema

Reading = Literal["numbers", "tensors", "plain", "general"]
"""How values are read: all Python numbers; all tensors; a mix of the two; or one by one (markers, numpy, None, ...)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """All that a signature tells: the schema, and the cheapest correct way to read the values of its leaves."""

    schema: Node
    reading: Reading
    leaf_count: int
    one_dtype: bool = False
    """All leaves are tensors of one floating dtype; known only where dtypes are kept."""

    @cached_property
    def encoded(self) -> bytes:
        """The schema as other ranks read it."""
        return encode_schema(self.schema)


class Flat(NamedTuple):
    """One rank's stats, taken apart: ``leaves[i]`` is the i-th leaf of ``structure.schema``."""

    structure: Structure
    leaves: list[Any]


class CannotFlatten(Exception):
    """Stats that have no schema; ``failure`` says where and why."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(format_path(path)[:_MAX_PATH_CHARS], message)


def unreadable(path: Path, error: Exception) -> CannotFlatten:
    """What to raise for a leaf whose value could not be read: by our own checks, or by a foreign type's code."""
    ours = isinstance(error, (TypeError, ValueError, RuntimeError, OverflowError))
    what = f"is {error}" if ours else f"cannot be read: {type(error).__name__}: {error}"
    return CannotFlatten(path, f"the value {what}")


NUMBERS: frozenset[type] = frozenset({float, int, bool})
_SIMPLE: frozenset[type] = NUMBERS | {torch.Tensor, type(None)}
_ATOMS: set[type] = set(_SIMPLE)  # types known to be leaves
_MASKED: set[type] = set()  # those of them that are numpy's masked arrays
_INTERCHANGEABLE = NUMBERS | {torch.Tensor}
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_SEQUENCES = frozenset({list, tuple})
_MAX_KEY_BITS = 1024
_MAX_PATH_CHARS = 1000  # of a path in an error

# A million generated names over a run must not stay here: at most this many structures and leaves.
_structures: BoundedCache[Hashable, Structure] = BoundedCache(max_entries=128, max_cost=262_144)


def flatten(stats: Any, keep_dtypes: bool = False) -> Flat:
    """Take ``stats`` apart. Local. Raises `CannotFlatten` for a key, type or depth that cannot be reduced."""
    if type(stats) is dict:
        recent = _recent.get((len(stats), keep_dtypes))
        if recent is not None and tuple(stats) == recent.keys:
            leaves = list(stats.values())
            if recent.types == {*map(type, leaves)} and (
                not keep_dtypes or recent.dtypes == {*map(_tensor_dtype, leaves)}
            ):
                return Flat(recent.structure, leaves)
    return _flatten_any(stats, keep_dtypes)


def _flatten_any(stats: Any, keep_dtypes: bool) -> Flat:
    leaves: list[Any] = []
    try:
        key: Hashable = _signature(stats, leaves, 0)
    except _Unfamiliar:
        return _walk(stats, keep_dtypes)
    signature, dtypes = key, _dtypes_key(leaves) if keep_dtypes else None
    if keep_dtypes:
        key = (signature, dtypes)
    known = _structures.get(key)
    if known is None:
        flat = _walk(stats, keep_dtypes)
        known, leaves = _structures.put(key, flat.structure, len(leaves) + 1), flat.leaves
    if type(stats) is dict and isinstance(signature, tuple) and (not keep_dtypes or isinstance(dtypes, torch.dtype)):
        _remember_recent(signature, known, dtypes)
    return Flat(known, leaves)


# -- the fastest look -------------------------------------------------------------------------------------------------


class _Recent(NamedTuple):
    """A flat dict of plain values with str keys. To compare its keys costs less than to hash them."""

    keys: tuple[Any, ...]
    types: frozenset[type]
    dtypes: frozenset[Any]
    structure: Structure


# By number of keys, and whether dtypes count (then all are tensors of one): the last such dict.
_recent: BoundedCache[tuple[int, bool], _Recent] = BoundedCache(max_entries=16, max_cost=262_144)


def _remember_recent(signature: tuple[Any, ...], structure: Structure, dtype: Hashable) -> None:
    """Keep ``signature`` of `_signature` if it is that of a flat dict of interchangeable values with str keys."""
    if len(signature) == 4 and are_str(signature[1]):
        _, keys, count, types = signature
        _recent.put((count, dtype is not None), _Recent(keys, types, frozenset([dtype]), structure), count + 1)


# -- the fast look ----------------------------------------------------------------------------------------------------


class _Unfamiliar(Exception):
    """Something the signature does not cover: the careful walk decides."""


def _signature(stats: Any, leaves: list[Any], depth: int) -> Hashable:
    """Keys and types of the whole tree; the leaves are appended to ``leaves`` on the way."""
    kind = type(stats)
    if kind in _MAPPINGS:
        keys, values = tuple(stats), tuple(stats.values())
        if not are_str(keys):  # 1, True and 1.0 are equal as keys, but not alike
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
    if types <= _INTERCHANGEABLE:  # which of them is where makes no difference, so one set stands for all
        return kind, keys, len(values), types
    return kind, keys, tuple(map(_atom, values))


def are_str(keys: tuple[Any, ...]) -> bool:
    try:
        "".join(keys)  # refuses anything else, and is four times as fast as looking at the types
    except TypeError:
        return False
    return True


def _atom(value: Any) -> Hashable:
    """A leaf's part of the signature: a marker around None is another thing than one around a value."""
    kind: type = type(value)
    if isinstance(value, Marker):
        return kind, is_absent(value.value)
    return (kind, is_absent(value)) if kind in _MASKED else kind


# The floating dtypes a result may have; any other one is reported as the nearest of these.
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


_tensor_dtype = attrgetter("dtype")


def _dtypes_key(leaves: list[Any]) -> Hashable:
    """The dtypes' part of a signature: one for all, or one per leaf."""
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
    leaves: list[Any] = []
    schema = _node(stats, (), leaves, set(), keep_dtypes)
    if schema is None:
        described = _kind_and_items(stats)
        schema = Container((described[0] if described else DICT,), (), ())
    reading = _reading(leaves)
    one_dtype = keep_dtypes and reading == "tensors" and _dtypes_key(leaves) in FLOATS.values()
    return Flat(Structure(schema, reading, len(leaves), one_dtype), leaves)


def _node(value: Any, path: Path, leaves: list[Any], above: set[int], keep_dtypes: bool) -> Node | None:
    """The schema of ``value``, or None for an empty container."""
    described = _kind_and_items(value)
    if described is None:
        return _leaf(value, path, leaves, keep_dtypes)
    kind, items = described
    if id(value) in above:
        raise CannotFlatten(path, "the structure contains itself")
    if len(path) >= MAX_DEPTH:
        raise CannotFlatten(path[:8], f"nested more than {MAX_DEPTH} deep below this path")
    above.add(id(value))
    children: dict[Step, Node] = {}
    for key, child in items:
        step = _checked_key(key, path) if not is_sequence(kind) else Index(key)
        if step in children:
            raise CannotFlatten((*path, step), "two keys of this dict are equal once they are plain str or int")
        node = _node(child, (*path, step), leaves, above, keep_dtypes)
        if node is not None:
            children[int(step) if isinstance(step, Index) else step] = node
    above.discard(id(value))
    return Container((kind,), tuple(children), tuple(children.values())) if children else None


def _leaf(value: Any, path: Path, leaves: list[Any], keep_dtypes: bool) -> Leaf:
    _check_leaf_type(value, path)
    leaves.append(value)
    if isinstance(value, torch.Tensor | Marker) or is_numpy(value):
        _ATOMS.add(type(value))
        if is_masked_array(value):
            _MASKED.add(type(value))
    if is_absent(value.value if isinstance(value, Marker) else value):
        return NONE_LEAF
    op = value.op if isinstance(value, Marker) else "mean"
    return leaf(op, (_dtype_of(value),) if keep_dtypes else ())


def _check_leaf_type(value: Any, path: Path) -> None:
    inner = value.value if isinstance(value, Marker) else value
    if inner is None or isinstance(inner, torch.Tensor) or hasattr(inner, "__float__") or is_numpy(inner):
        return
    if isinstance(inner, timedelta):
        raise CannotFlatten(path, f"{_type_name(inner)} is not a leaf; pass a number, such as its .total_seconds()")
    raise CannotFlatten(
        path,
        f"{_type_name(inner)} is not a leaf; a leaf is a real number, a tensor, None, or one of the markers "
        "Mean, Sum, Min, Max, Any, All",
    )


def is_numpy(value: Any) -> bool:
    """An array or a scalar of numpy."""
    numpy = sys.modules.get("numpy")  # never imported for this: who holds an array has imported it
    return numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray))


def is_masked_array(value: Any) -> bool:
    """An array of ``numpy.ma``; `numpy.ma.masked` is one, too."""
    masked = sys.modules.get("numpy.ma")  # numpy itself loads it at its first use
    return masked is not None and isinstance(value, masked.MaskedArray)


def mask_of(array: Any) -> list[bool]:
    """Which entries of a masked array of one dimension are masked."""
    found: list[bool] = sys.modules["numpy.ma"].getmaskarray(array).tolist()
    return found


def is_absent(value: Any) -> bool:
    """None, or numpy's way to say so: a value that is masked, or several that are all masked."""
    if value is None or not is_masked_array(value):
        return value is None
    mask = value.mask
    return bool(mask.dtype.kind == "b" and (mask.size == 1 or mask.ndim == 1) and mask.size and mask.all())


def _checked_key(key: Any, path: Path) -> Step:
    if isinstance(key, str):
        return key if type(key) is str else str.__str__(key)
    if isinstance(key, int):
        number = int(key)
        if number.bit_length() > _MAX_KEY_BITS:  # Python itself refuses to print integers of some thousand digits
            raise CannotFlatten(path, f"an int key of {number.bit_length()} bits; at most {_MAX_KEY_BITS} are allowed")
        return number
    shown = repr(key)[:60]
    raise CannotFlatten((*path, shown), f"the key {shown} is of type {_type_name(key)}; a key is a str or an int")


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _kind_and_items(value: Any) -> tuple[str, Iterator[tuple[Any, Any]]] | None:
    """What container ``value`` is and its items, or None for a leaf."""
    if isinstance(value, Marker):
        return None
    if isinstance(value, Mapping):
        return (ORDERED_DICT if isinstance(value, OrderedDict) else DICT), iter(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return remember_class(NAMEDTUPLE, type(value)), zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple):
        return (LIST if isinstance(value, list) else TUPLE), enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value)]
        return remember_class(DATACLASS, type(value)), ((name, getattr(value, name)) for name in names)
    return None


def _reading(leaves: list[Any]) -> Reading:
    types = set(map(type, leaves))
    if types <= NUMBERS:
        return "numbers"
    if types == {torch.Tensor}:
        return "tensors"
    return "plain" if types <= _INTERCHANGEABLE else "general"
