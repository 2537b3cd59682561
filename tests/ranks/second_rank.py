"""One rank that speaks the protocol of docs/protocol.md, written from that page: nothing of ddpstats is used here.

It knows dicts and lists of numbers, None and ``(op, value)``. It does not know classes of the user, dtypes of leaves,
products that a float64 cannot hold, slots that are dropped after 256 calls, and what follows a rank that is gone.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

OPS = ("none", "mean", "sum", "min", "max", "any", "all")
ROOMS = [kib << 10 for kib in (1, 2, 4, 16, 64, 256, 512, 1024)]
NONFINITE, NONE = 1 << 17, 1 << 34
VERSION = 4
Path = tuple[str | int, ...]


# --- what a rank holds, and its bytes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    op: str


@dataclass(frozen=True)
class Box:
    """A container."""

    kinds: tuple[str, ...]
    keys: tuple[str | int, ...]
    children: tuple[Any, ...]
    nullable: bool = False

    @property
    def is_list(self) -> bool:
        return self.kinds[0] in ("list", "tuple")


Node = Leaf | Box
EMPTY = Box(("dict",), (), ())


@dataclass(frozen=True)
class Numbers:
    weight: float
    sums: tuple[float, ...]
    weights: tuple[float, ...]
    has_one_weight: bool


def schema_of(stats: Any) -> Node:
    found = _schema(stats)
    return found or Box(("list" if isinstance(stats, list) else "dict",), (), ())


def _schema(stats: Any) -> Node | None:
    if not isinstance(stats, (dict, list)):
        return Leaf(stats[0] if isinstance(stats, tuple) else "none" if stats is None else "mean")
    items = stats.items() if isinstance(stats, dict) else enumerate(stats)
    held = [(key, node) for key, value in items if (node := _schema(value)) is not None]
    kind = "dict" if isinstance(stats, dict) else "list"
    return Box((kind,), tuple(key for key, _ in held), tuple(node for _, node in held)) if held else None


def leaves_of(stats: Any) -> Iterator[Any]:
    if isinstance(stats, (dict, list)):
        for value in stats.values() if isinstance(stats, dict) else stats:
            yield from leaves_of(value)
    else:
        yield stats


def numbers_of(stats: Any, weight: float) -> Numbers:
    leaves = list(leaves_of(stats))
    if all(isinstance(leaf, float) for leaf in leaves):
        return Numbers(weight, tuple(leaf * weight for leaf in leaves), (weight,) * len(leaves), True)
    pairs = [
        (0.0, 0.0) if leaf is None else (leaf[1], 1.0) if isinstance(leaf, tuple) else (leaf * weight, weight)
        for leaf in leaves
    ]
    return Numbers(weight, tuple(s for s, _ in pairs), tuple(w for _, w in pairs), False)


def digest8(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=8).digest()


def digest16(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


def text(value: str) -> bytes:
    payload = value.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(payload)) + payload


def optional(value: str | None) -> bytes:
    return b"\0" if value is None else b"\1" + text(value)


def schema_bytes(node: Node) -> bytes:
    if isinstance(node, Leaf):
        return bytes([OPS.index(node.op)])
    keys = [str(key).encode() for key in node.keys]
    return b"".join(
        [
            bytes([0x21 if node.nullable else 0x20]),
            struct.pack("<H", len(node.kinds)) + b"".join(map(text, node.kinds)),
            struct.pack("<I", len(keys)),
            bytes(isinstance(key, int) for key in node.keys),
            struct.pack(f"<{len(keys)}I", *map(len, keys)),
            *keys,
            *map(schema_bytes, node.children),
        ]
    )


def numbers_bytes(numbers: Numbers) -> bytes:
    weights = (numbers.weight,) if numbers.has_one_weight else numbers.weights
    lanes = [numbers.weight, *numbers.sums, *weights]
    return bytes([1 if numbers.has_one_weight else 2]) + struct.pack(f"<{len(lanes)}dII", *lanes, 0, 0)


class Reader:
    def __init__(self, payload: bytes) -> None:
        self.left = payload

    def take(self, count: int) -> bytes:
        taken, self.left = self.left[:count], self.left[count:]
        assert len(taken) == count, "bytes that end too early"
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.take(self.number("I")).decode("utf-8", "surrogatepass")

    def optional(self) -> str | None:
        return self.text() if self.number("B") else None

    def schema(self) -> Node:
        tag = self.number("B")
        if tag < len(OPS):
            return Leaf(OPS[tag])
        assert tag in (0x20, 0x21)
        kinds = tuple(self.text() for _ in range(self.number("H")))
        count = self.number("I")
        is_int = self.take(count)
        lengths = [self.number("I") for _ in range(count)]
        keys = [self.take(length).decode() for length in lengths]
        named = tuple(int(key) if kind else key for key, kind in zip(keys, is_int, strict=True))
        return Box(kinds, named, tuple(self.schema() for _ in named), tag == 0x21)

    def numbers(self, leaves: int) -> Numbers:
        has_one_weight = self.number("B") == 1
        weight = self.number("d")
        sums = tuple(self.number("d") for _ in range(leaves))
        weights = tuple(self.number("d") for _ in range(1 if has_one_weight else leaves))
        assert self.number("Q") == 0, "neither scaled products nor mixed leaves"
        assert not self.left, "bytes too many"
        return Numbers(weight, sums, weights * leaves if has_one_weight else weights, has_one_weight)


# --- layouts ---------------------------------------------------------------------------------------------------------


def union(held: list[Node]) -> Node:
    """Of what ranks hold under one path, in the order of ranks."""
    some = [node for node in held if node != Leaf("none")]
    if not some:
        return Leaf("none")
    first = some[0]
    if isinstance(first, Leaf):
        assert all(node == first for node in some), "SchemaConflict"
        return first
    boxes = [node for node in some if isinstance(node, Box) and node.is_list == first.is_list]
    assert len(boxes) == len(some), "SchemaConflict"
    keys = list(dict.fromkeys(key for box in boxes for key in box.keys))
    children = {
        key: union([box.children[box.keys.index(key)] for box in boxes if key in box.keys])
        for key in (sorted(keys, key=int) if first.is_list else keys)
    }
    nullable = len(some) < len(held) or any(box.nullable for box in boxes)
    kinds = tuple(dict.fromkeys(kind for box in boxes for kind in box.kinds))
    return Box(kinds, tuple(children), tuple(children.values()), nullable)


def overlay(old: Node, new: Node) -> Node:
    if isinstance(new, Leaf):
        if isinstance(old, Box):
            return replace(old, nullable=True) if new.op == "none" and old.keys else new
        return old if new.op in ("none", old.op) else new
    if isinstance(old, Leaf):
        return replace(new, nullable=True) if old.op == "none" else new
    if not old.keys or old.is_list != new.is_list:
        return new
    children = dict(zip(old.keys, old.children, strict=True))
    for key, child in zip(new.keys, new.children, strict=True):
        children[key] = overlay(children[key], child) if key in children else child
    keys = sorted(children, key=int) if old.is_list else list(children)
    kinds = tuple(dict.fromkeys(old.kinds + new.kinds))
    return Box(kinds, tuple(keys), tuple(children[key] for key in keys), old.nullable or new.nullable)


def slots_of(node: Node, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """(path, what the slot is for), in the order of slots."""
    if isinstance(node, Leaf):
        yield path, "value"
        return
    if node.nullable:
        yield path, "none"
    if len(node.kinds) > 1:
        yield from ((path, kind) for kind in node.kinds)
    for key, child in zip(node.keys, node.children, strict=True):
        yield from slots_of(child, (*path, key))


def nodes_of(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    yield path, node
    if isinstance(node, Box):
        for key, child in zip(node.keys, node.children, strict=True):
            yield from nodes_of(child, (*path, key))


def place(mine: Node, root: Node) -> tuple[list[int], list[float]] | None:
    """The slot of each leaf, and this rank's codes; None where the layout lacks something."""
    slots = {which: number for number, which in enumerate(slots_of(root))}
    agreed = dict(nodes_of(root))
    placed, codes = list[int](), [0.0] * len(slots)
    for path, node in nodes_of(mine):
        there = agreed.get(path)
        if isinstance(node, Box):
            if not isinstance(there, Box) or node.kinds[0] not in there.kinds:
                return None
            if len(there.kinds) > 1:
                codes[slots[path, node.kinds[0]]] = 1.0
            continue
        slot = slots.get((path, "none" if isinstance(there, Box) and node.op == "none" else "value"))
        if slot is None or (node.op != "none" and node != there):
            return None
        placed.append(slot)
        codes[slot] = float(NONE if node.op == "none" else 1)
    return placed, codes


def is_plain(node: Node) -> bool:
    return all(
        node != Leaf("none") and not (isinstance(node, Box) and (node.nullable or len(node.kinds) > 1))
        for _, node in nodes_of(node)
    )


# --- the rank --------------------------------------------------------------------------------------------------------


def capacity_for(lanes: int) -> int:
    step = max(64, (1 << (lanes - 1).bit_length()) // 16)
    return -(-lanes // step) * step


def room_lanes(size: int) -> list[float]:
    place_of = sum(size > room for room in ROOMS)
    lanes = [0.0, 0.0, 0.0]
    lanes[place_of // 3] = float(2 ** (17 * (place_of % 3)))
    return lanes


def call_lanes(kind: str, name: str | None, policy: str, agreed: bytes) -> list[float]:
    parts = ["=" + kind, "" if name is None else "=" + name, "=" + policy, ""]
    chunks = struct.unpack("<4H", digest8("\0".join(parts).encode() + b"\0" + agreed))
    return [float(lane) for chunk in chunks for lane in (chunk, chunk * chunk)]


def status_bytes(kind: str, name: str | None, policy: str, is_stale: bool, agreed: bytes, body: bytes) -> bytes:
    told = struct.pack("<H", VERSION) + text(kind) + optional(name) + text(policy)
    return told + b"\0" + optional(None) + text("") + bytes([is_stale]) + agreed + body


@dataclass
class Totals:
    """What is in the lanes after a sum, and the largest values of minima and maxima."""

    is_partial: bool
    weight: float
    sums: list[float]
    weights: list[float]
    codes: list[float]
    extremes: dict[int, float] = field(default_factory=dict)

    def plus(self, other: Totals) -> Totals:
        return Totals(
            self.is_partial or other.is_partial,
            self.weight + other.weight,
            list(map(operator.add, self.sums, other.sums)),
            list(map(operator.add, self.weights, other.weights)),
            list(map(operator.add, self.codes, other.codes)),
            {slot: max(value, other.extremes[slot]) for slot, value in self.extremes.items()},
        )


class SecondRank:
    """A member of ``group``. Making one is local; ranks meet at the first call."""

    def __init__(self, group: dist.ProcessGroup, version: str, timeout_sec: float) -> None:
        self.ranks = sorted(dist.get_process_group_ranks(group))
        self.size, self.rank, self.timeout_sec = len(self.ranks), dist.get_rank(), timeout_sec
        self.layouts: dict[str | None, Node] = {}
        self.capacity, self.collectives = capacity_for(16), 0
        store: Any = group.get_group_store().clone()  # type: ignore[attr-defined]
        generation = store.add(f"ddpstats/generation/{self.rank}", 1)
        self.store: Any = dist.PrefixStore(f"ddpstats/{generation}", store)  # type: ignore[attr-defined]
        self.process = struct.pack("<16sqq", bytes(16), os.getpid(), 0)
        self._meet()
        self.gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", self.store),  # type: ignore[attr-defined]
            self.ranks.index(self.rank),
            self.size,
            timedelta(seconds=timeout_sec),
        )
        hello = b"ddpstats" + struct.pack("<H", VERSION) + version.encode().ljust(32, b"\0")
        assert all(told[:42] == hello for told in self._all_gather(hello + self.process)), "ProtocolMismatch"
        self.collectives = 0  # the greeting does not count

    def _meet(self) -> None:
        store, host, deadline = self.store, f"host/{bytes(16).hex()}", time.monotonic() + self.timeout_sec
        store.set(f"here/{self.rank}", self.process)
        store.set(f"{host}/{store.add(host, 1)}", str(self.rank))
        if store.add("here", 1) >= self.size and store.check([f"here/{rank}" for rank in self.ranks]):
            store.set("all here", "1")
        while not store.check(["all here"]):
            assert time.monotonic() < deadline, "not all ranks came"
            time.sleep(0.01)

    def _all_gather(self, payload: bytes) -> list[bytes]:
        self.collectives += 1
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in self.ranks]
        self.gloo.allgather([found], [mine]).wait()
        return [bytes(one.tolist()) for one in found]

    def _all_reduce(self, lanes: list[float], op: Any = dist.ReduceOp.SUM) -> list[float]:
        self.collectives += 1
        tensor, options = torch.tensor(lanes, dtype=torch.float64), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        self.gloo.allreduce([tensor], options).wait()
        return list(tensor.tolist())

    def any_rank(self, flag: bool) -> bool:
        seal = call_lanes("any_rank", None, "", bytes(8))
        lanes = [*seal, 0.0, 0.0, 1.0, 0.0, 0.0, *room_lanes(100), float(flag)]
        summed = self._all_reduce(lanes + [0.0] * (self.capacity - len(lanes)))
        assert summed[:10] == [self.size * lane for lane in seal] + [0.0, 0.0]
        return summed[16] > 0

    def reduce(self, stats: Any, weight: float, name: str | None) -> dict[str, tuple[Any, ...]]:
        """Name of each path -> (value, weight, ranks that hold it, ranks where it is not finite)."""
        mine, numbers = schema_of(stats), numbers_of(stats, weight)
        for _ in range(4):
            root = self.layouts.get(name, EMPTY)
            agreed, placed = digest8(schema_bytes(root)), place(mine, root)
            body = struct.pack("<H", 0) + schema_bytes(mine)
            status = status_bytes("reduce_stats", name, "propagate", placed is None, agreed, body)
            content = struct.pack("<I", len(status)) + status + numbers_bytes(numbers)
            seal = call_lanes("reduce_stats", name, "propagate", agreed)
            lanes = [*seal, float(placed is None), 0.0, 1.0, weight, 0.0, *room_lanes(24 + len(content))]
            if placed is not None:
                share = self._share(root, mine, numbers)
                lanes[10] = float(share.is_partial)
                lanes += share.sums + share.weights + share.codes
            summed = self._all_reduce(lanes + [0.0] * (self.capacity - len(lanes)))
            if summed[:10] == [self.size * lane for lane in seal] + [0.0, 0.0]:
                assert placed is not None
                return self._result(root, self._read(root, summed, share))
            told = self._tell(content, summed[13:16])
            if told is not None:
                total = self._agree(name, root, told)
                return self._result(self.layouts[name], total)
        raise AssertionError("the ranks do not settle on a layout")

    def _read(self, root: Node, summed: list[float], share: Totals) -> Totals:
        count = len(list(slots_of(root)))
        sums, weights, codes = (summed[16 + i * count : 16 + (i + 1) * count] for i in range(3))
        found = Totals(bool(summed[10]), summed[11], sums, weights, codes)
        if any(codes[slot] for slot in share.extremes):
            largest = self._all_reduce(list(share.extremes.values()), dist.ReduceOp.MAX)
            found.extremes = dict(zip(share.extremes, largest, strict=True))
        return found

    def _tell(self, content: bytes, room_counts: list[float]) -> list[bytes] | None:
        """The content that each rank tells."""
        places = [3 * lane + i for lane in range(3) for i in range(3) if int(room_counts[lane]) >> 17 * i & (2**17 - 1)]
        room = ROOMS[max(places)]
        assert room * self.size <= 1 << 24, "statuses alone are exchanged then"
        packets = self._all_gather((struct.pack("<Q", len(content)) + digest16(content) + content).ljust(room, b"\0"))
        told = [packet[24 : 24 + int.from_bytes(packet[:8], "little")] for packet in packets]
        assert [digest16(one) for one in told] == [packet[8:24] for packet in packets]
        return told

    def _agree(self, name: str | None, root: Node, told: list[bytes]) -> Totals:
        """The new layout, and what all ranks hold, added up in the order of ranks."""
        schemas, numbers = [], []
        for one in told:
            length = int.from_bytes(one[:4], "little")
            reader = Reader(one[4 : 4 + length])
            assert reader.number("H") == VERSION
            assert (reader.text(), reader.optional(), reader.text()) == ("reduce_stats", name, "propagate")
            assert reader.number("B") == 0
            assert (reader.optional(), reader.text()) == (None, ""), "InvalidStats"
            reader.take(1 + 8)
            assert reader.number("H") == 0
            schemas.append(reader.schema())
            leaves = sum(isinstance(node, Leaf) for _, node in nodes_of(schemas[-1]))
            numbers.append(Reader(one[4 + length :]).numbers(leaves))
        held = [node for node in schemas if not isinstance(node, Box) or node.keys] or schemas[:1]
        self.layouts[name] = root = union(held) if root == EMPTY else overlay(root, union(held))
        needed = max(16 + 3 * len(list(slots_of(layout))) for layout in self.layouts.values())
        self.capacity = capacity_for(needed)
        shares = [self._share(root, schema, one) for schema, one in zip(schemas, numbers, strict=True)]
        return functools.reduce(Totals.plus, shares)

    def _share(self, root: Node, schema: Node, numbers: Numbers) -> Totals:
        """One rank's lanes."""
        ops = [dict(nodes_of(root)).get(path) if what == "value" else None for path, what in slots_of(root)]
        signs = {slot: -1.0 if op.op == "min" else 1.0 for slot, op in enumerate(ops)
                 if isinstance(op, Leaf) and op.op in ("min", "max")}  # fmt: skip
        found = place(schema, root)
        assert found is not None
        placed, codes = found
        sums, weights, extremes = [0.0] * len(codes), [0.0] * len(codes), dict.fromkeys(signs, -math.inf)
        for slot, value, weight in zip(placed, numbers.sums, numbers.weights, strict=True):
            if not math.isfinite(value):
                codes[slot] += NONFINITE
            if slot in signs and codes[slot] % NONE and value == value:
                extremes[slot] = signs[slot] * value
                value = 0.0
            sums[slot], weights[slot] = value, weight
        is_whole = schema == root and is_plain(root) and numbers.has_one_weight and all(map(math.isfinite, sums))
        return Totals(not is_whole, numbers.weight, sums, weights, codes, extremes)

    def _result(self, root: Node, found: Totals) -> dict[str, tuple[Any, ...]]:
        result: dict[str, tuple[Any, ...]] = {}
        nodes, slots = dict(nodes_of(root)), list(slots_of(root))
        for slot, (path, what) in enumerate(slots):
            code, node = int(found.codes[slot]), nodes[path]
            below = [n for n, (other, _) in enumerate(slots) if other[: len(path)] == path and len(other) > len(path)]
            if not code or what not in ("value", "none") or any(found.codes[n] for n in below):
                continue
            weight = found.weights[slot] if found.is_partial else found.weight
            value = None if code % NONE == 0 else self._value(node, slot, found, weight)
            result[_spelled(root, path)] = value, weight, code % NONFINITE, code // NONFINITE % NONFINITE
        return result

    def _value(self, node: Node, slot: int, found: Totals, weight: float) -> float | bool:
        total = found.sums[slot]
        if not isinstance(node, Leaf) or weight == 0 or math.isnan(total):
            return math.nan
        if slot in found.extremes:
            return -found.extremes[slot] if node.op == "min" else found.extremes[slot]
        return {"mean": total / weight, "sum": total, "any": total > 0, "all": total == weight}[node.op]


def _spelled(root: Node, path: Path) -> str:
    spelled, node = "", root
    for key in path:
        assert isinstance(node, Box)
        spelled += f"[{key}]" if node.is_list else f"/{key}" if spelled else str(key)
        node = node.children[node.keys.index(key)]
    return spelled
