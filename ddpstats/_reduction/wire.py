"""Schemas and numbers as bytes, and back. Canonical, without pickle.

Whatever `decode_*` is given comes from another process: it is checked completely (lengths, UTF-8, key order,
nesting, no byte left over) and refused with ``ProtocolMismatch`` where it is not exactly what `encode_*` writes.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from ddpstats._base.exact_sums import Scaled
from ddpstats._base.paths import Step
from ddpstats._ranks.codec import Reader, from_utf8, put_texts, refuse, utf8
from ddpstats._reduction.schema import MAX_DEPTH, OPS, Container, Leaf, Node, is_kind, is_sequence, leaf

_UNTYPED: dict[Node, int] = {leaf(op): tag for tag, op in enumerate(OPS)}
_CONTAINER, _NULLABLE_CONTAINER, _TYPED_LEAF = 0x20, 0x21, 0x40
_MAX_POSITION = 1 << 24  # a result holds a list as long as the last position
_MAX_EXPONENT = 5000  # of a sum of products of two float64
_SCALED = struct.Struct("<Idi")


@dataclass(frozen=True)
class Holding:
    """What one rank's status says of a reduction besides; see `Status.body`."""

    unbuildable: tuple[str, ...]
    schema: Node


@dataclass(frozen=True)
class Numbers:
    """One rank's part of a call, one entry per leaf of its schema; see ``Part`` of `_reduction.values`."""

    weight: float
    sums: array[float]
    weights: float | array[float]
    scaled: Mapping[int, Scaled]
    mixed: tuple[int, ...] = ()


def encode_schema(node: Node) -> bytes:
    out: list[bytes] = []
    _put_node(out, node)
    return b"".join(out)


def decode_schema(payload: bytes) -> Node:
    reader = Reader(payload)
    node = _take_node(reader, 0)
    reader.finish()
    return node


def encode_holding(unbuildable: tuple[str, ...], schema: bytes) -> bytes:
    """``schema``: as `encode_schema` gives it; it is kept where stats have the same structure again."""
    out: list[bytes] = []
    put_texts(out, unbuildable)
    out.append(schema)
    return b"".join(out)


def decode_holding(body: bytes) -> Holding:
    reader = Reader(body)
    holding = Holding(reader.texts(), _take_node(reader, 0))
    reader.finish()
    return holding


def numbers_bytes(leaves: int) -> int:
    """The most bytes that the `Numbers` of so many leaves can have, without those of `more_bytes`."""
    return 1 + 8 + 16 * max(leaves, 1) + 8


def more_bytes(scaled: int, mixed: int) -> int:
    """How many more it is with so many entries of `Numbers.scaled` and `Numbers.mixed`."""
    return _SCALED.size * scaled + 4 * mixed


def encode_numbers(numbers: Numbers | None) -> bytes:
    if numbers is None:
        return b"\0"
    one_weight = isinstance(numbers.weights, float)
    weights = (numbers.weights,) if isinstance(numbers.weights, float) else numbers.weights
    lanes = (numbers.weight, *numbers.sums, *weights)
    out = [b"\1" if one_weight else b"\2", struct.pack(f"<{len(lanes)}d", *lanes)]
    out.append(struct.pack("<I", len(numbers.scaled)))
    out += [_SCALED.pack(leaf, *numbers.scaled[leaf]) for leaf in sorted(numbers.scaled)]
    out.append(struct.pack(f"<I{len(numbers.mixed)}I", len(numbers.mixed), *numbers.mixed))
    return b"".join(out)


def decode_numbers(payload: bytes, leaves: int) -> Numbers | None:
    """The numbers of a schema with so many leaves."""
    reader = Reader(payload)
    kind = reader.take(1)[0]
    if kind > 2:
        refuse(f"numbers of kind {kind}")
    numbers = _take_numbers(reader, leaves, kind == 1) if kind else None
    reader.finish()
    return numbers


def _take_numbers(reader: Reader, leaves: int, one_weight: bool) -> Numbers:
    weight, *lanes = reader.numbers("d", 1 + leaves + (1 if one_weight else leaves))
    weights = array("d", lanes[leaves:])
    if not all(0 <= value < math.inf for value in (weight, *weights)):
        refuse("a weight that is negative or not finite")
    scaled: dict[int, Scaled] = {}
    last = -1
    for _ in range(reader.numbers("I", 1)[0]):
        position, mantissa, exponent = _SCALED.unpack(reader.take(_SCALED.size))
        if not last < position < leaves or not math.isfinite(mantissa) or abs(exponent) > _MAX_EXPONENT:
            refuse(f"the number {mantissa} times 2**{exponent} for leaf {position} of {leaves}")
        scaled[position], last = (mantissa, exponent), position
    mixed = tuple(map(int, reader.numbers("I", int(reader.numbers("I", 1)[0]))))
    if any(position >= leaves for position in mixed) or list(mixed) != sorted(set(mixed)):
        refuse(f"leaves {mixed[:8]} of {leaves} that had values which are not finite")
    return Numbers(weight, array("d", lanes[:leaves]), weights[0] if one_weight else weights, scaled, mixed)


def encode_slots(slots: list[int]) -> bytes:
    """Slot numbers, for the one exchange that names which ranks were non-finite where."""
    return struct.pack(f"<{len(slots)}I", *slots)


def decode_slots(payload: bytes, size: int) -> tuple[int, ...]:
    if len(payload) % 4:
        refuse(f"a list of slots of {len(payload)} bytes")
    slots = struct.unpack(f"<{len(payload) // 4}I", payload)
    if any(slot >= size for slot in slots):
        refuse(f"a slot beyond the agreed {size}")
    return slots


# -- nodes ------------------------------------------------------------------------------------------------------------


def _put_node(out: list[bytes], node: Node) -> None:
    if isinstance(node, Leaf):
        if node.dtypes:
            out.append(bytes((_TYPED_LEAF, OPS.index(node.op))))
            put_texts(out, node.dtypes)
        else:
            out.append(bytes((OPS.index(node.op),)))
        return
    out.append(bytes((_NULLABLE_CONTAINER if node.nullable else _CONTAINER,)))
    put_texts(out, node.kinds)
    _put_keys(out, node.keys)
    if {*map(type, node.children)} == {Leaf} and _UNTYPED.keys() >= {*node.children}:
        out.append(bytes(map(_UNTYPED.__getitem__, node.children)))  # leaves of a flat tree, all at once
        return
    for child in node.children:
        _put_node(out, child)


def _take_node(reader: Reader, depth: int) -> Node:
    if depth > MAX_DEPTH:
        refuse(f"a structure deeper than {MAX_DEPTH}")
    tag = reader.take(1)[0]
    if tag < len(OPS):
        return leaf(OPS[tag])
    if tag == _TYPED_LEAF:
        op = reader.take(1)[0]
        dtypes = reader.texts()
        if op >= len(OPS) or not dtypes:
            refuse("a typed leaf without an op or a dtype")
        return leaf(OPS[op], dtypes)
    if tag not in (_CONTAINER, _NULLABLE_CONTAINER):
        refuse(f"an unknown node tag {tag}")
    kinds = reader.texts()
    if not kinds or not all(map(is_kind, kinds)) or len(set(map(is_sequence, kinds))) != 1:
        refuse(f"a container of kinds {kinds!r}")
    keys = _take_keys(reader, is_sequence(kinds[0]))
    children = tuple(_take_node(reader, depth + 1) for _ in keys)
    return Container(kinds, keys, children, tag == _NULLABLE_CONTAINER)


def _put_keys(out: list[bytes], keys: tuple[Step, ...]) -> None:
    out.append(struct.pack("<I", len(keys)))
    joined = _joined(keys)
    if joined is not None and joined.isascii():  # as many bytes as characters: all at once
        out += (bytes(len(keys)), struct.pack(f"<{len(keys)}I", *map(len, keys)), joined.encode())  # type: ignore[arg-type]
        return
    texts = [utf8(key) if isinstance(key, str) else b"%d" % key for key in keys]
    out.append(bytes(isinstance(key, int) for key in keys))
    out.append(struct.pack(f"<{len(keys)}I", *map(len, texts)))
    out.extend(texts)


def _joined(keys: tuple[Step, ...]) -> str | None:
    try:
        return "".join(keys)  # type: ignore[arg-type]
    except TypeError:  # an int among them
        return None


def _take_keys(reader: Reader, sequence: bool) -> tuple[Step, ...]:
    count = int(reader.numbers("I", 1)[0])
    is_int = reader.take(count)
    keys = tuple(
        _integer(text) if kind == 1 else from_utf8(text)
        for kind, text in zip(is_int, map(reader.take, reader.numbers("I", count)), strict=True)
    )
    if set(is_int) - {0, 1} or len(set(keys)) != count:
        refuse("a container whose keys are not unique")
    if sequence and (not all(is_int) or list(keys) != sorted(keys, key=int) or not _are_positions(keys)):
        refuse("a sequence whose positions are not ascending integers")
    return keys


def _are_positions(keys: tuple[Step, ...]) -> bool:
    return not keys or (int(keys[0]) >= 0 and int(keys[-1]) < _MAX_POSITION)


def _integer(text: bytes) -> int:
    try:
        number = int(text)
    except ValueError:
        refuse(f"an integer key {text[:20]!r}")
    if b"%d" % number != text:
        refuse(f"an integer key {text[:20]!r}")
    return number
