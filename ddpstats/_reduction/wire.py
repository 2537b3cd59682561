"""Schemas and statuses as bytes, and back. Versioned, canonical, without pickle.

Whatever `decode_*` is given comes from another process: it is checked completely (version, lengths, UTF-8, key order,
nesting, no byte left over) and refused with ``ProtocolMismatch`` where it is not exactly what `encode_*` writes.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from ddpstats._base.exact_sums import Scaled
from ddpstats._base.paths import Step
from ddpstats._reduction.schema import MAX_DEPTH, OPS, Container, Leaf, Node, is_kind, is_sequence, leaf
from ddpstats.errors import ProtocolMismatch

PROTOCOL_VERSION = 2

_UNTYPED: dict[Node, int] = {leaf(op): tag for tag, op in enumerate(OPS)}
_CONTAINER, _NULLABLE_CONTAINER, _TYPED_LEAF = 0x20, 0x21, 0x40
_MAX_ERROR_CHARS = 2000
_MAX_POSITION = 1 << 28  # a result holds a list as long as the last position
_MAX_EXPONENT = 5000  # of a sum of products of two float64
_SCALED = struct.Struct("<Idi")


def fingerprint(payload: bytes) -> bytes:
    """8 bytes, the same in every process and on every machine (never `hash`, which is salted)."""
    return hashlib.blake2b(payload, digest_size=8).digest()


@dataclass(frozen=True)
class Failure:
    """Why a rank could not prepare its part: the path at fault ("" for the call as a whole) and what is wrong."""

    path: str
    message: str


@dataclass(frozen=True)
class Status:
    """What one rank says of one call when the control lanes were not clean. Equal on ranks that agree."""

    call: str
    name: str | None
    nonfinite: str
    failure: Failure | None
    stale: bool
    layout: bytes
    unbuildable: tuple[str, ...]
    schema: Node


@dataclass(frozen=True)
class Numbers:
    """One rank's part of a call, one entry per leaf of its schema; see ``Part`` of `_reduction.values`."""

    weight: float
    sums: array[float]
    weights: float | array[float]
    scaled: Mapping[int, Scaled]


def encode_schema(node: Node) -> bytes:
    out: list[bytes] = []
    _put_node(out, node)
    return b"".join(out)


def decode_schema(payload: bytes) -> Node:
    reader = _Reader(payload)
    node = _take_node(reader, 0)
    reader.finish()
    return node


def encode_status(status: Status, schema: bytes | None = None) -> bytes:
    """``schema``: ``status.schema`` as bytes, where somebody has them already."""
    out = [struct.pack("<H", PROTOCOL_VERSION)]
    _put_text(out, status.call)
    _put_optional(out, status.name)
    _put_text(out, status.nonfinite)
    _put_optional(out, None if status.failure is None else status.failure.path)
    _put_text(out, "" if status.failure is None else status.failure.message[:_MAX_ERROR_CHARS])
    out.append(b"\1" if status.stale else b"\0")
    out.append(status.layout)
    _put_texts(out, status.unbuildable)
    if schema is None:
        _put_node(out, status.schema)
    else:
        out.append(schema)
    return b"".join(out)


def decode_status(payload: bytes) -> Status:
    reader = _Reader(payload)
    version = int(reader.numbers("H", 1)[0])
    if version != PROTOCOL_VERSION:
        _refuse(f"protocol version {version}, this rank speaks {PROTOCOL_VERSION}")
    call, name, nonfinite = reader.text(), reader.optional(), reader.text()
    path, message = reader.optional(), reader.text()
    status = Status(
        call=call,
        name=name,
        nonfinite=nonfinite,
        failure=None if path is None else Failure(path, message),
        stale=reader.flag(),
        layout=reader.take(8),
        unbuildable=reader.texts(),
        schema=_take_node(reader, 0),
    )
    reader.finish()
    return status


def numbers_bytes(leaves: int) -> int:
    """The most bytes that the `Numbers` of so many leaves can have, without those of `scaled_bytes`."""
    return 1 + 8 + 16 * max(leaves, 1) + 4


def scaled_bytes(count: int) -> int:
    return _SCALED.size * count


def failure_bytes(failure: Failure) -> int:
    """How much longer a status is that tells it."""
    return 4 + len(_utf8(failure.path)) + len(_utf8(failure.message[:_MAX_ERROR_CHARS]))


def encode_numbers(numbers: Numbers | None) -> bytes:
    if numbers is None:
        return b"\0"
    one_weight = isinstance(numbers.weights, float)
    weights = (numbers.weights,) if isinstance(numbers.weights, float) else numbers.weights
    lanes = (numbers.weight, *numbers.sums, *weights)
    out = [b"\1" if one_weight else b"\2", struct.pack(f"<{len(lanes)}d", *lanes)]
    out.append(struct.pack("<I", len(numbers.scaled)))
    out += [_SCALED.pack(leaf, *numbers.scaled[leaf]) for leaf in sorted(numbers.scaled)]
    return b"".join(out)


def decode_numbers(payload: bytes, leaves: int) -> Numbers | None:
    """The numbers of a schema with so many leaves."""
    reader = _Reader(payload)
    kind = reader.take(1)[0]
    if kind > 2:
        _refuse(f"numbers of kind {kind}")
    numbers = _take_numbers(reader, leaves, kind == 1) if kind else None
    reader.finish()
    return numbers


def _take_numbers(reader: _Reader, leaves: int, one_weight: bool) -> Numbers:
    weight, *lanes = reader.numbers("d", 1 + leaves + (1 if one_weight else leaves))
    weights = array("d", lanes[leaves:])
    if not all(0 <= value < math.inf for value in (weight, *weights)):
        _refuse("a weight that is negative or not finite")
    scaled: dict[int, Scaled] = {}
    last = -1
    for _ in range(reader.numbers("I", 1)[0]):
        position, mantissa, exponent = _SCALED.unpack(reader.take(_SCALED.size))
        if not last < position < leaves or not math.isfinite(mantissa) or abs(exponent) > _MAX_EXPONENT:
            _refuse(f"the number {mantissa} times 2**{exponent} for leaf {position} of {leaves}")
        scaled[position], last = (mantissa, exponent), position
    return Numbers(weight, array("d", lanes[:leaves]), weights[0] if one_weight else weights, scaled)


def encode_slots(slots: list[int]) -> bytes:
    """Slot numbers, for the one exchange that names which ranks were non-finite where."""
    return struct.pack(f"<{len(slots)}I", *slots)


def decode_slots(payload: bytes, size: int) -> tuple[int, ...]:
    if len(payload) % 4:
        _refuse(f"a list of slots of {len(payload)} bytes")
    slots = struct.unpack(f"<{len(payload) // 4}I", payload)
    if any(slot >= size for slot in slots):
        _refuse(f"a slot beyond the agreed {size}")
    return slots


# -- nodes ------------------------------------------------------------------------------------------------------------


def _put_node(out: list[bytes], node: Node) -> None:
    if isinstance(node, Leaf):
        if node.dtypes:
            out.append(bytes((_TYPED_LEAF, OPS.index(node.op))))
            _put_texts(out, node.dtypes)
        else:
            out.append(bytes((OPS.index(node.op),)))
        return
    out.append(bytes((_NULLABLE_CONTAINER if node.nullable else _CONTAINER,)))
    _put_texts(out, node.kinds)
    _put_keys(out, node.keys)
    if {*map(type, node.children)} == {Leaf} and _UNTYPED.keys() >= {*node.children}:
        out.append(bytes(map(_UNTYPED.__getitem__, node.children)))  # leaves of a flat tree, all at once
        return
    for child in node.children:
        _put_node(out, child)


def _take_node(reader: _Reader, depth: int) -> Node:
    if depth > MAX_DEPTH:
        _refuse(f"a structure deeper than {MAX_DEPTH}")
    tag = reader.take(1)[0]
    if tag < len(OPS):
        return leaf(OPS[tag])
    if tag == _TYPED_LEAF:
        op = reader.take(1)[0]
        dtypes = reader.texts()
        if op >= len(OPS) or not dtypes:
            _refuse("a typed leaf without an op or a dtype")
        return leaf(OPS[op], dtypes)
    if tag not in (_CONTAINER, _NULLABLE_CONTAINER):
        _refuse(f"an unknown node tag {tag}")
    kinds = reader.texts()
    if not kinds or not all(map(is_kind, kinds)) or len(set(map(is_sequence, kinds))) != 1:
        _refuse(f"a container of kinds {kinds!r}")
    keys = _take_keys(reader, is_sequence(kinds[0]))
    children = tuple(_take_node(reader, depth + 1) for _ in keys)
    return Container(kinds, keys, children, tag == _NULLABLE_CONTAINER)


def _put_keys(out: list[bytes], keys: tuple[Step, ...]) -> None:
    texts = [_utf8(key) if isinstance(key, str) else b"%d" % key for key in keys]
    out.append(struct.pack("<I", len(keys)))
    out.append(bytes(isinstance(key, int) for key in keys))
    out.append(struct.pack(f"<{len(keys)}I", *map(len, texts)))
    out.extend(texts)


def _take_keys(reader: _Reader, sequence: bool) -> tuple[Step, ...]:
    count = int(reader.numbers("I", 1)[0])
    is_int = reader.take(count)
    keys = tuple(
        _integer(text) if kind == 1 else _from_utf8(text)
        for kind, text in zip(is_int, map(reader.take, reader.numbers("I", count)), strict=True)
    )
    if set(is_int) - {0, 1} or len(set(keys)) != count:
        _refuse("a container whose keys are not unique")
    if sequence and (not all(is_int) or list(keys) != sorted(keys, key=int) or not _are_positions(keys)):
        _refuse("a sequence whose positions are not ascending integers")
    return keys


def _are_positions(keys: tuple[Step, ...]) -> bool:
    return not keys or (int(keys[0]) >= 0 and int(keys[-1]) < _MAX_POSITION)


def _integer(text: bytes) -> int:
    try:
        number = int(text)
    except ValueError:
        _refuse(f"an integer key {text[:20]!r}")
    if b"%d" % number != text:
        _refuse(f"an integer key {text[:20]!r}")
    return number


# -- primitives -------------------------------------------------------------------------------------------------------


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a key may hold any Unicode, lone surrogates included


def _from_utf8(payload: bytes) -> str:
    try:
        return payload.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        _refuse(f"text that is not UTF-8 ({error.reason})")


def _put_text(out: list[bytes], text: str) -> None:
    payload = _utf8(text)
    out += (struct.pack("<I", len(payload)), payload)


def _put_optional(out: list[bytes], text: str | None) -> None:
    out.append(b"\0" if text is None else b"\1")
    if text is not None:
        _put_text(out, text)


def _put_texts(out: list[bytes], texts: tuple[str, ...]) -> None:
    out.append(struct.pack("<H", len(texts)))
    for text in texts:
        _put_text(out, text)


class _Reader:
    """A position in untrusted bytes; every read is checked against what is left."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, 0

    def take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._payload):
            _refuse("bytes that end too early")
        return self._payload[start : self._at]

    def numbers(self, code: str, count: int) -> tuple[int, ...]:
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack(self.take(layout.size))

    def flag(self) -> bool:
        value = self.take(1)[0]
        if value > 1:
            _refuse(f"a flag of value {value}")
        return value == 1

    def text(self) -> str:
        return _from_utf8(self.take(self.numbers("I", 1)[0]))

    def optional(self) -> str | None:
        return self.text() if self.flag() else None

    def texts(self) -> tuple[str, ...]:
        return tuple(self.text() for _ in range(self.numbers("H", 1)[0]))

    def finish(self) -> None:
        if self._at != len(self._payload):
            _refuse(f"{len(self._payload) - self._at} bytes too many")


def _refuse(what: str) -> NoReturn:
    raise ProtocolMismatch(
        f"a peer sent {what}; ranks must run the same version of ddpstats (protocol {PROTOCOL_VERSION})"
    )
