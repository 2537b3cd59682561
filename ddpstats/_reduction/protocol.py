"""One reduction, from each rank's prepared part to the same result, or the same error, on every rank.

1. Each rank places its leaves in the layout agreed before, and writes values and control lanes into the group's buffer.
2. One all_reduce(SUM). It is never conditional: a rank that is stale or failed takes part and says so in its lanes.
3. Control lanes clean: all ranks made the same call on the same layout. Read the result; if the layout holds minima or
   maxima, one all_reduce(MAX) more.
4. Not clean, on every rank alike: exchange what each rank holds. `layout_agreement` raises, or yields a new layout; the
   numbers came with the statuses, so every rank adds them up itself (`summation`), and that is the result. Where they
   would be too many bytes for every rank to have, statuses are exchanged alone; then back to 1.
5. Numbers that float64 cannot hold (a product of value and weight, a sum over ranks) take the same way as new paths: in
   step 1 a rank that has one says "stale", in step 3 all ranks see the sum.

What changes here (layouts, capacity, ages) changes only after all ranks have agreed, and is computed from what all
ranks know. So all ranks drop unused slots at the same call without a word to each other.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from ddpstats._agreement.vectors import is_finite, pick, quotient
from ddpstats._base.bounded_cache import BoundedCache
from ddpstats._base.paths import Step
from ddpstats._base.rank_names import ranks_text
from ddpstats._reduction.buffer import (
    FLAG,
    PARTIAL,
    WEIGHT,
    Buffer,
    Seal,
    capacity_for,
    lanes_needed,
    room_lanes,
    section_lanes,
)
from ddpstats._reduction.layout import Layout, Placement, Selection, place, prune, result_kinds, select
from ddpstats._reduction.layout_agreement import Statuses, agree
from ddpstats._reduction.result import Reduced, finish, overflown
from ddpstats._reduction.schema import (
    EMPTY,
    Container,
    Node,
    is_flat,
    is_sequence,
    iter_slots,
    leaf_nodes,
    marker_count,
)
from ddpstats._reduction.summation import Share, Summation, extremes_from, extremes_of, lanes_of
from ddpstats._reduction.tree import Builder, Structure, buildable, builder
from ddpstats._reduction.values import Part, Prepared, too_small_or_large
from ddpstats._reduction.wire import (
    Failure,
    Status,
    decode_numbers,
    decode_slots,
    decode_status,
    encode_numbers,
    encode_slots,
    encode_status,
    failure_bytes,
    fingerprint,
    numbers_bytes,
    scaled_bytes,
)
from ddpstats._transport.comm import Comm
from ddpstats.errors import InvalidStats, NonFiniteStat, ProtocolMismatch

# A slot that no rank used for this many calls of its name is dropped, so that generated key names cannot pile up; at a
# renegotiation, unused slots beyond this multiple of the used ones are dropped as well, the longest unused first.
RETENTION_CALLS = 256
_UNUSED_PER_USED, _UNUSED_AT_LEAST = 4, 1024

GATHER = "gather"
"""The kind of `Protocol.gather`'s calls."""

_RIDING_BYTES = 1 << 14  # of all ranks together; above that a second collective is cheaper
_ROOM_PER_NEED = 4  # room that is larger than this multiple of what was needed last is given up

_MAX_SITES = 1024
_MAX_ROUNDS = 4
_MAX_PAYLOAD_BYTES = 1 << 30
_MAX_GATHERED_BYTES = 1 << 34  # of one rank
_HEAD = struct.Struct("<Q16s")
_LENGTH = struct.Struct("<Q")
_STATUS_LENGTH = struct.Struct("<I")
_OTHER_POLICY_BYTES = 16  # by so much the name of one policy may be longer than that of another
_MAX_MEETING_BYTES = 1 << 24  # of what all ranks tell all ranks, numbers included
_SHOWN_PATHS = 10


DECISIONS = frozenset({"any_rank", "all_ranks", "NaNCapture.check", "Sentinel.step"})
"""Calls that count the ranks whose flag is set."""


@dataclass(frozen=True)
class Call:
    """What stays the same from one call of a reducer to the next."""

    kind: str
    name: str | None
    nonfinite: str
    timeout_sec: float
    apart: bool = False
    """Of a gather: never in the buffer that all calls share, which then stays small."""

    @cached_property
    def is_decision(self) -> bool:
        """Decisions have no stats, and so no layout."""
        return self.kind in DECISIONS

    @cached_property
    def skips(self) -> bool:
        return self.nonfinite == "skip"

    @cached_property
    def site_key(self) -> tuple[str, str | None]:
        return self.kind, self.name

    @cached_property
    def seal_key(self) -> tuple[str, str | None, str]:
        return self.kind, self.name, self.nonfinite


@dataclass
class _Used:
    """A selection, its slots' codes, and the last call that showed it."""

    selection: Selection
    codes: bytes
    call: int


@dataclass
class Site:
    """What all ranks agreed on for one name, and what this rank derived from it."""

    layout: Layout = field(default_factory=Layout)
    calls: int = 0
    whole_call: int = -1
    last_used: array[int] = field(default_factory=lambda: array("q"))
    unbuildable: tuple[str, ...] = ()
    room: int = 0  # bytes that each rank has in a gather
    apart: bool = False

    def __post_init__(self) -> None:
        self.seals: dict[tuple[str, str | None, str], Seal] = {}
        self.placements: BoundedCache[Structure, Placement] = BoundedCache(64, 262_144)
        self.selections: BoundedCache[bytes, _Used] = BoundedCache(16, 65_536, self._age)
        self.builders: BoundedCache[Selection, Builder] = BoundedCache(16, 65_536)

    def adopt(self, layout: Layout) -> None:
        """Go over to ``layout``; what was known of slots that stay is kept."""
        self._flush()
        slots_of = _keys_of if _are_plain(self.layout.root, layout.root) else iter_slots
        known = dict(zip(slots_of(self.layout.root), self.last_used, strict=True)) if self.layout.size else {}
        self.last_used = (
            array("q", [known.get(slot, self.calls) for slot in slots_of(layout.root)])
            if known
            else array("q", [self.calls]) * layout.size
        )
        self.layout = layout
        self.seals.clear()
        self.placements.clear()
        self.selections.clear()
        self.builders.clear()

    def without_unused(self, oldest: int) -> Layout:
        """The layout without the slots that no rank used since call ``oldest``."""
        self._flush()
        if self.whole_call >= oldest:
            return self.layout
        held = bytes(call >= oldest for call in self.last_used)
        if all(held):
            return self.layout
        return Layout(prune(self.layout.root, held)[0], self.layout.unbuildable)

    def oldest_kept(self) -> int:
        """The call such that slots unused since may go, at a renegotiation."""
        self._flush()
        used = sum(call >= self.calls - 1 for call in self.last_used)
        unused = sorted((call for call in self.last_used if call < self.calls - 1), reverse=True)
        room = max(_UNUSED_AT_LEAST, _UNUSED_PER_USED * used)
        limit = unused[room] + 1 if len(unused) > room else 0
        return max(limit, self.calls - RETENTION_CALLS)

    def _flush(self) -> None:
        for used in self.selections.values():
            self._age(used)

    def _age(self, used: _Used) -> None:
        for slot, code in enumerate(memoryview(used.codes).cast("d")):
            if code and self.last_used[slot] < used.call:
                self.last_used[slot] = used.call


@dataclass
class Counters:
    """Of one reducer; `ddpstats.ReductionCounters` is the frozen copy that users see."""

    calls: int = 0
    collectives: int = 0
    renegotiations: int = 0
    payload_bytes: int = 0


class _Summed(NamedTuple):
    """What the buffer says of one call: one entry per leaf of the selection."""

    selection: Selection
    sums: array[float]
    weights: array[float] | None
    total: float

    @property
    def divisor(self) -> float | array[float]:
        return self.total if self.weights is None else self.weights


class _DamagedError(Exception):
    """Bytes from a peer that are not what it announced."""


class Protocol:
    """All reductions of one group, one at a time. Not thread-safe: `_reduction.channel` puts calls in order."""

    def __init__(self, comm: Comm, group_name: str) -> None:
        self._comm, self._group_name = comm, group_name
        self.world_size, self.position = len(comm.ranks), comm.ranks.index(comm.rank)
        self._sites: OrderedDict[tuple[str, str | None], Site] = OrderedDict()
        self._buffer = Buffer(capacity_for(lanes_needed(0)))
        self._no_site = Site()  # decisions have no layout
        self.collectives = 0  # of this group so far: how ranks tell each other where they wait

    def reduce(self, call: Call, given: Prepared, divide: bool, counters: Counters) -> Reduced:
        """Every rank must call. Raises what `_reduction.layout_agreement` raises, `NonFiniteStat`, and `CommFailed`.

        ``divide`` False leaves means as weighted sums; a matter of this rank alone.
        """
        counters.calls += 1
        prepared = given.part()
        site = self._sites.get(call.site_key) or Site()
        for _ in range(_MAX_ROUNDS):
            placement = self._write(call, site, prepared, divide)
            agreed = self._sum(call, site, counters)
            if agreed:
                assert isinstance(prepared, Part)
                assert placement is not None
                reduced = self._read(call, site, prepared, placement, divide, counters)
                if reduced is not None:
                    return reduced
            together = self._renegotiate(call, site, prepared, placement, counters, divide, stale=agreed)
            if together is not None:
                return self._add_up(call, site, together, divide)
        raise ProtocolMismatch(
            f"the ranks of {self._group_name} do not settle on a layout for name={call.name!r}: their stats or their "
            "versions of ddpstats change from one moment to the next",
            group=self._group_name,
        )

    def decide(self, call: Call, flag: bool | Failure, counters: Counters) -> float:
        """How many ranks' flags are set. Every rank must call."""
        counters.calls += 1
        failure = flag if isinstance(flag, Failure) else None
        seal = self._seal(call, self._no_site)
        self._buffer.seal(
            seal, self._room(seal, failure, None), stale=False, failed=failure is not None, flag=float(flag is True)
        )
        if not self._sum(call, self._no_site, counters):
            self._renegotiate(call, self._no_site, failure, None, counters)
        return self._buffer.lane(FLAG)

    def gather(self, call: Call, payload: bytearray | Failure, counters: Counters) -> list[memoryview]:
        """Every rank's payload, of any length, in the order of ranks. Every rank must call.

        The control lanes prove that all ranks gather, and that the room agreed before is enough for all of them. Small
        payloads ride in the same collective, as numbers that every other rank adds zero to; large ones take a second,
        and so do those of a call that wants to be `Call.apart`.
        """
        counters.calls += 1
        site = self._sites.get(call.site_key) or Site(apart=call.apart)
        for _ in range(_MAX_ROUNDS):
            failure = payload if isinstance(payload, Failure) else None
            mine = self._framed(site, payload) if isinstance(payload, bytearray) else None
            seal, stale = self._seal(call, site), failure is None and mine is None
            self._buffer.seal(seal, self._room(seal, failure, None), stale=stale, failed=failure is not None)
            if mine is not None and self._rides(site):
                self._buffer.write_section(self.position, self.world_size, mine)
            if self._sum(call, site, counters):
                assert mine is not None
                return self._parts(site, self._received(call, site, mine, counters))
            self._renegotiate(call, site, failure, None, counters, stale=failure is None and mine is None)
            self._make_room(call, site, len(payload) if isinstance(payload, bytearray) else 0, counters)
        raise ProtocolMismatch(f"the ranks of {self._group_name} do not settle on a size", group=self._group_name)

    def _framed(self, site: Site, payload: bytearray) -> bytearray | None:
        """The payload behind its length, padded to the room; None where that is too small."""
        if _LENGTH.size + len(payload) > site.room:
            return None
        framed = bytearray(site.room)
        _LENGTH.pack_into(framed, 0, len(payload))
        framed[_LENGTH.size : _LENGTH.size + len(payload)] = payload
        return framed

    def _rides(self, site: Site) -> bool:
        return not site.apart and site.room * self.world_size <= _RIDING_BYTES

    def _received(self, call: Call, site: Site, mine: bytearray, counters: Counters) -> Sequence[bytes | bytearray]:
        if self._rides(site):
            return self._buffer.sections(self.world_size, site.room)
        self._count(counters, site.room)
        return self._comm.all_gather(mine, call.timeout_sec)

    def _parts(self, site: Site, received: Sequence[bytes | bytearray]) -> list[memoryview]:
        lengths = [_LENGTH.unpack_from(part)[0] for part in received]
        start, most = _LENGTH.size, max(lengths)
        if most + start > site.room:
            raise _DamagedError(f"a peer announces {most} bytes where {site.room} were agreed")
        if room_for(most) * _ROOM_PER_NEED < site.room:  # once large, now small: all ranks see it alike
            self._set_room(site, room_for(most))
        return [memoryview(part)[start : start + length] for part, length in zip(received, lengths, strict=True)]

    def _set_room(self, site: Site, room: int) -> None:
        site.room = room
        site.seals.clear()
        self._resize()

    def _make_room(self, call: Call, site: Site, needed: int, counters: Counters) -> None:
        self._count(counters, _LENGTH.size)
        sizes = [_LENGTH.unpack(part)[0] for part in self._comm.all_gather(_LENGTH.pack(needed), call.timeout_sec)]
        if max(sizes) > _MAX_GATHERED_BYTES:
            ranks = [rank for rank, size in zip(self._comm.ranks, sizes, strict=True) if size > _MAX_GATHERED_BYTES]
            raise InvalidStats(
                f"{ranks_text(ranks)} would send {max(sizes):,} bytes to every rank; the limit is "
                f"{_MAX_GATHERED_BYTES:,}",
                ranks=ranks,
                group=self._group_name,
            )
        self._set_room(site, room_for(max(sizes)))

    # -- 1. write -----------------------------------------------------------------------------------------------------

    def _write(self, call: Call, site: Site, prepared: Part | Failure, divide: bool) -> Placement | None:
        placement = None if isinstance(prepared, Failure) else self._placement(call, site, prepared.structure)
        stale = _is_stale(site, prepared, placement, divide)
        weight = 0.0 if isinstance(prepared, Failure) else prepared.weight
        seal = self._seal(call, site)
        room = self._room(seal, prepared, placement)
        self._buffer.seal(seal, room, stale=stale, failed=placement is None, weight=weight)
        if isinstance(prepared, Part) and placement is not None and not stale:
            if placement.whole and prepared.finite and isinstance(prepared.weights, float):
                self._buffer.write_whole(site.layout, prepared.sums, prepared.weights, placement.codes)
            else:
                self._write_partial(call, site, prepared, placement)
        return placement

    def _write_partial(self, call: Call, site: Site, part: Part, placement: Placement) -> None:
        sums, weights, codes = lanes_of(site.layout, placement, part.sums, part.weights, part.finite, call.skips)
        self._buffer.write_partial(site.layout, placement.slots, sums, weights, codes)

    def _placement(self, call: Call, site: Site, structure: Structure) -> Placement:
        known = site.placements.get(structure)
        if known is not None:
            return known
        needed = self._seal(call, site).status_bytes + len(structure.encoded) + numbers_bytes(structure.leaf_count)
        placement = replace(place(structure.schema, site.layout), room=room_lanes(needed))
        return site.placements.put(structure, placement, structure.leaf_count + 1)

    def _room(
        self, seal: Seal, prepared: Part | Failure | None, placement: Placement | None
    ) -> tuple[float, float, float]:
        """Room for this rank's packet, should the ranks have to meet."""
        if isinstance(prepared, Part) and placement is not None:
            if not prepared.scaled:
                return placement.room
            structure, scaled = prepared.structure, scaled_bytes(len(prepared.scaled))
            needed = len(structure.encoded) + numbers_bytes(structure.leaf_count) + scaled
            return room_lanes(seal.status_bytes + needed)
        if isinstance(prepared, Failure):
            return room_lanes(seal.status_bytes + failure_bytes(prepared))
        return seal.room

    def _seal(self, call: Call, site: Site) -> Seal:
        seal = site.seals.get(call.seal_key)
        if seal is None:
            parts = ("" if part is None else "=" + part for part in call.seal_key)
            text = "\0".join(parts).encode("utf-8", "surrogatepass")
            print_ = fingerprint(text + b"\0" + _agreed_before(call, site))
            status = len(encode_status(_status(call, site, None, stale=False))) + _OTHER_POLICY_BYTES
            packet = _HEAD.size + _STATUS_LENGTH.size + status + numbers_bytes(0)
            seal = site.seals[call.seal_key] = Seal.of(print_, self.world_size, packet)
        return seal

    # -- 2. sum -------------------------------------------------------------------------------------------------------

    def _sum(self, call: Call, site: Site, counters: Counters) -> bool:
        self._count(counters, self._buffer.capacity * 8)
        self._comm.all_reduce_sum(self._buffer.tensor, call.timeout_sec)
        return self._buffer.is_agreed(self._seal(call, site))

    def _count(self, counters: Counters, payload_bytes: int) -> None:
        if self.world_size == 1:
            return  # plain arithmetic: nothing is sent
        self.collectives += 1
        counters.collectives += 1
        counters.payload_bytes += payload_bytes

    # -- 3. read ------------------------------------------------------------------------------------------------------

    def _read(
        self, call: Call, site: Site, part: Part, placement: Placement, divide: bool, counters: Counters
    ) -> Reduced | None:
        """The result; None where a sum over ranks was too large for a float64, on every rank alike."""
        layout, summed = site.layout, self._summed(call, site)
        extremes = self._extremes(call, layout, part, placement, counters) if layout.extremes else {}
        if call.nonfinite == "raise" and summed.selection.nonfinite is not None:
            error = self._nonfinite_error(call, layout, part, placement, counters)
            self._end_call(site)
            raise error
        means, finite = quotient(summed.sums, summed.divisor) if divide else (summed.sums.tolist(), True)
        overflows = [] if finite else overflown(summed.selection, means, summed.divisor, call.skips)
        if overflows:
            if self._can_meet() is None:
                raise self._overflow_error(layout.names[summed.selection.slots[overflows[0]]])
            return None
        return self._result(
            site, summed, finish(layout, summed.selection, means, summed.sums, summed.divisor, extremes)
        )

    def _add_up(self, call: Call, site: Site, together: Summation, divide: bool) -> Reduced:
        """The result from what every rank told every rank: nothing more is sent."""
        together.write_to(self._buffer)
        layout, summed = site.layout, self._summed(call, site)
        selection = summed.selection
        if call.nonfinite == "raise" and selection.nonfinite is not None:
            self._end_call(site)
            held = [(slots, (self._comm.ranks[position],)) for position, slots in together.nonfinite()]
            raise self._nonfinite_text(layout, held)
        means, finite = quotient(summed.sums, summed.divisor) if divide else (summed.sums.tolist(), True)
        mended = together.scaled_slots()
        if not finite:
            mended |= {selection.slots[i] for i in overflown(selection, means, summed.divisor, call.skips)}
        values = finish(layout, selection, means, summed.sums, summed.divisor, together.extremes())
        for slot in mended:
            values[selection.position_of[slot]] = together.exact(slot)
        return self._result(site, summed, values)

    def _result(self, site: Site, summed: _Summed, values: list[float | bool | None]) -> Reduced:
        build = self._builder(site, summed.selection)
        reduced = Reduced(
            build(iter(values)),
            summed.total,
            site.layout,
            summed.selection,
            values,
            summed.weights,
            self.world_size,
            build,
        )
        self._end_call(site)
        return reduced

    def _summed(self, call: Call, site: Site) -> _Summed:
        layout, buffer = site.layout, self._buffer
        total = buffer.lane(WEIGHT)
        self._sites.setdefault(call.site_key, site)
        self._sites.move_to_end(call.site_key)
        if buffer.lane(PARTIAL) == 0:
            site.whole_call = site.calls
            selection, weights = layout.everything, None
        else:
            selection = self._selection(site, bytes(buffer.codes(layout)))
            weights = pick(buffer.weights(layout), selection.slots)
        if not math.isfinite(total) or not (weights is None or is_finite(weights)):
            self._end_call(site)
            raise self._heavy_error(layout, selection, total, weights)
        return _Summed(selection, pick(buffer.sums(layout), selection.slots), weights, total)

    def _overflow_error(self, path: str) -> InvalidStats:
        return InvalidStats(
            f"the sum over ranks of {path!r}, values times weights, is too large for a float64 on {self._group_name}.\n"
            "Use weights closer to 1, or reduce fewer paths at once: then it is computed exactly.",
            ranks=self._comm.ranks,
            path=path,
            group=self._group_name,
        )

    def _heavy_error(
        self, layout: Layout, selection: Selection, total: float, weights: array[float] | None
    ) -> InvalidStats:
        """Every rank's weight is finite, and their sum is not: nothing can be divided by it."""
        path = None
        if math.isfinite(total) and weights is not None:
            position = next(position for position, weight in enumerate(weights) if not math.isfinite(weight))
            path = layout.names[selection.slots[position]]
        where = f" of {path!r}" if path is not None else ""
        return InvalidStats(
            f"the weights{where} add up to more than a float64 can hold, over the ranks of {self._group_name}.\n"
            "Divide them all by one number. Nothing was reduced; the reducer goes on working.",
            ranks=self._comm.ranks,
            path=path,
            group=self._group_name,
        )

    def _builder(self, site: Site, selection: Selection) -> Builder:
        build = site.builders.get(selection)
        if build is None:
            build = site.builders.put(selection, builder(selection.schema), len(selection.slots) + 1)
        return build

    def _selection(self, site: Site, codes: bytes) -> Selection:
        used = site.selections.get(codes)
        if used is None:
            selection = select(site.layout, memoryview(codes).cast("d").tolist())
            used = site.selections.put(codes, _Used(selection, codes, site.calls), site.layout.size + 1)
        used.call = site.calls
        return used.selection

    def _extremes(
        self, call: Call, layout: Layout, part: Part, placement: Placement, counters: Counters
    ) -> dict[int, float]:
        """The second collective: minima as maxima of the negated values; who has no value sends minus infinity."""
        mine = dict(extremes_of(layout, placement, part.sums, call.skips))
        held = [mine.get(slot, -math.inf) for slot in layout.extremes]
        tensor = torch.tensor(held, dtype=torch.float64, device="cpu")
        self._count(counters, tensor.numel() * 8)
        self._comm.all_reduce_max(tensor, call.timeout_sec)
        return extremes_from(layout, tensor.tolist())

    def _nonfinite_error(
        self, call: Call, layout: Layout, part: Part, placement: Placement, counters: Counters
    ) -> NonFiniteStat:
        """The summed lanes told every rank that some rank is non-finite; one exchange says which, and where."""
        mine = [slot for slot, v in zip(placement.slots, part.sums, strict=True) if not math.isfinite(v)]
        told = self._exchange(encode_slots(mine), call, counters)
        return self._nonfinite_text(layout, [(decode_slots(payload, layout.size), ranks) for payload, ranks in told])

    def _nonfinite_text(self, layout: Layout, held: Iterable[tuple[Sequence[int], Sequence[int]]]) -> NonFiniteStat:
        """``held``: slots that are not finite, and on which ranks."""
        ranks_of: dict[int, list[int]] = {}
        for slots, ranks in held:
            for slot in slots:
                ranks_of.setdefault(slot, []).extend(ranks)
        names = layout.names
        lines = [f"non-finite stats (nonfinite='raise') on {self._group_name}:"]
        lines += [f"  {names[slot]!r}: {ranks_text(ranks)}" for slot, ranks in sorted(ranks_of.items())[:_SHOWN_PATHS]]
        if len(ranks_of) > _SHOWN_PATHS:
            lines.append(f"  and {len(ranks_of) - _SHOWN_PATHS} more paths")
        involved = {rank for ranks in ranks_of.values() for rank in ranks}
        first = names[min(ranks_of)] if ranks_of else None
        return NonFiniteStat("\n".join(lines), ranks=involved, path=first, group=self._group_name)

    def _end_call(self, site: Site) -> None:
        site.calls += 1
        if site.calls % RETENTION_CALLS == 0:
            self._shrink(site)
        if len(self._sites) > _MAX_SITES:
            self._sites.popitem(last=False)
            self._resize()

    def _shrink(self, site: Site) -> None:
        layout = site.without_unused(site.calls - RETENTION_CALLS)
        if layout is not site.layout:
            site.adopt(layout)
            self._resize()

    def _resize(self) -> None:
        needed = max(map(self._lanes, self._sites.values()), default=lanes_needed(0))
        if capacity_for(needed) != self._buffer.capacity:
            self._buffer = Buffer(capacity_for(needed))

    def _lanes(self, site: Site) -> int:
        riding = section_lanes(self.world_size, site.room) if self._rides(site) else 0
        return max(lanes_needed(site.layout.size), riding)

    # -- 4. renegotiate -----------------------------------------------------------------------------------------------

    def _renegotiate(
        self,
        call: Call,
        site: Site,
        prepared: Part | Failure | None,
        placement: Placement | None,
        counters: Counters,
        divide: bool = True,
        stale: bool = False,
    ) -> Summation | None:
        """Agree on a layout; returns all ranks' numbers where they came along and every rank can build the result."""
        counters.renegotiations += 1
        room = self._can_meet()
        all_numbers: list[bytes] | None = None
        stale = stale or _is_stale(site, prepared, placement, divide)
        status = _status(call, site, prepared, stale=stale)
        schema = prepared.structure.encoded if isinstance(prepared, Part) else None
        if room is not None:
            numbers = prepared.numbers(divide) if isinstance(prepared, Part) else None
            everyone, all_numbers = self._meet(
                encode_status(status, schema), encode_numbers(numbers), room, call, counters
            )
        else:
            if isinstance(prepared, Part) and prepared.scaled and divide:
                status = replace(status, failure=too_small_or_large(prepared), schema=EMPTY)
                schema = None
            everyone = self._exchange(encode_status(status, schema), call, counters)
        statuses: Statuses = [(decode_status(payload), ranks) for payload, ranks in everyone]
        before = site.layout
        layout = agree(statuses, site.without_unused(site.oldest_kept()), self._group_name)
        if len({status.layout for status, _ in statuses}) > 1:
            site.calls, before = 0, Layout()
        self._adopt(call, site, layout)
        if all_numbers is None or call.kind == GATHER or not _all_can_build(layout, before, statuses):
            return None
        return self._summation(call, site.layout, statuses, all_numbers)

    def _adopt(self, call: Call, site: Site, layout: Layout) -> None:
        if layout.root != site.layout.root or layout.unbuildable != site.layout.unbuildable:
            site.adopt(layout)
            site.unbuildable = tuple(sorted(kind for kind in result_kinds(layout.root) if not buildable(kind)))
        self._sites[call.site_key] = site
        self._resize()

    def _summation(
        self, call: Call, layout: Layout, statuses: Statuses, all_numbers: Sequence[bytes]
    ) -> Summation | None:
        numbers_of = dict(zip(self._comm.ranks, all_numbers, strict=True))
        shares: dict[int, Share] = {}
        for status, ranks in statuses:
            placement, leaves = place(status.schema, layout), sum(1 for _ in leaf_nodes(status.schema))
            for rank in ranks:
                numbers = decode_numbers(numbers_of[rank], leaves)
                if numbers is None or placement.stale:
                    return None
                shares[rank] = Share(placement, numbers)
        return Summation(layout, [shares[rank] for rank in self._comm.ranks], call.skips)

    def _can_meet(self) -> int | None:
        """The room for what any rank has to tell; None where all of that would be too much for every rank to have."""
        room = self._buffer.room()
        return room if room is not None and room * self.world_size <= _MAX_MEETING_BYTES else None

    def _meet(
        self, status: bytes, numbers: bytes, room: int, call: Call, counters: Counters
    ) -> tuple[list[tuple[bytes, tuple[int, ...]]], list[bytes]]:
        """Every distinct status with the ranks that hold it, and every rank's numbers, in one collective."""
        content = _STATUS_LENGTH.pack(len(status)) + status + numbers
        packet = bytearray(room)
        packet[: _HEAD.size] = _HEAD.pack(len(content), hashlib.blake2b(content, digest_size=16).digest())
        packet[_HEAD.size : _HEAD.size + len(content)] = content
        if len(packet) != room:
            raise _DamagedError(f"{len(packet)} bytes to tell, where {room} were announced")
        self._count(counters, room)
        holders: dict[bytes, list[int]] = {}
        all_numbers: list[bytes] = []
        for rank, received in zip(self._comm.ranks, self._comm.all_gather(packet, call.timeout_sec), strict=True):
            size, expected = _HEAD.unpack_from(received)
            told = bytes(received[_HEAD.size : _HEAD.size + size])
            if len(told) < _STATUS_LENGTH.size or hashlib.blake2b(told, digest_size=16).digest() != expected:
                raise _DamagedError(f"what {ranks_text([rank])} sent arrived damaged")
            end = _STATUS_LENGTH.size + _STATUS_LENGTH.unpack_from(told)[0]
            holders.setdefault(told[_STATUS_LENGTH.size : end], []).append(rank)
            all_numbers.append(told[end:])
        return [(held, tuple(ranks)) for held, ranks in holders.items()], all_numbers

    def _exchange(self, payload: bytes, call: Call, counters: Counters) -> list[tuple[bytes, tuple[int, ...]]]:
        """Every rank's payload, each distinct one once, with the ranks that hold it.

        First the digests of all ranks, of fixed size; then one broadcast per distinct payload. In the usual program
        all ranks but a few hold the same, so this stays small where gathering everything would not.
        """
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        self._count(counters, _HEAD.size)
        heads = self._comm.all_gather(_HEAD.pack(len(payload), digest), call.timeout_sec)
        holders: dict[bytes, list[int]] = {}
        for position, head in enumerate(heads):
            holders.setdefault(bytes(head), []).append(position)
        found: list[tuple[bytes, tuple[int, ...]]] = []
        for head, positions in holders.items():
            size, expected = _HEAD.unpack(head)
            if size > _MAX_PAYLOAD_BYTES:
                raise ProtocolMismatch(
                    f"a peer announces {size} bytes of schema; at most {_MAX_PAYLOAD_BYTES} are read"
                )
            mine = payload if self._comm.ranks[positions[0]] == self._comm.rank else None
            self._count(counters, size)
            received = self._comm.broadcast(mine, size, positions[0], call.timeout_sec)
            if hashlib.blake2b(received, digest_size=16).digest() != expected:
                # Known to this rank alone, so no error that all ranks raise: the channel tells them that it is closed.
                raise _DamagedError(f"what {ranks_text([self._comm.ranks[positions[0]]])} sent arrived damaged")
            found.append((received, tuple(self._comm.ranks[position] for position in positions)))
        return found


def _agreed_before(call: Call, site: Site) -> bytes:
    """What ranks must have in common before they send anything whose size depends on it."""
    if call.kind == GATHER:
        return site.room.to_bytes(8, "little")
    return bytes(8) if call.is_decision else site.layout.fingerprint


def room_for(size: int) -> int:
    """Room for ``size`` bytes and their length, with some to grow."""
    return 16 * capacity_for(-(-(size + _LENGTH.size) // 16))


def _are_plain(*roots: Node) -> bool:
    """Whether their keys tell their slots apart, as `iter_slots` does, with less work: flat mappings."""
    return all(
        isinstance(root, Container) and not marker_count(root) and not is_sequence(root.kinds[0]) and is_flat(root)
        for root in roots
    )


def _keys_of(root: Node) -> tuple[Step, ...]:
    return root.keys if isinstance(root, Container) else ()


def _status(call: Call, site: Site, prepared: Part | Failure | None, *, stale: bool) -> Status:
    return Status(
        call=call.kind,
        name=call.name,
        nonfinite=call.nonfinite,
        failure=prepared if isinstance(prepared, Failure) else None,
        stale=stale,
        layout=_agreed_before(call, site),
        unbuildable=site.unbuildable,
        schema=prepared.structure.schema if isinstance(prepared, Part) else EMPTY,
    )


def _is_stale(site: Site, prepared: Part | Failure | None, placement: Placement | None, divide: bool) -> bool:
    """Whether this rank cannot say with the layout what it has to say."""
    if site.unbuildable or (placement is not None and placement.stale):
        return True
    return divide and isinstance(prepared, Part) and bool(prepared.scaled)


def _all_can_build(layout: Layout, before: Layout, statuses: Statuses) -> bool:
    """Whether every rank is known to have every class of the user that a result may hold: new ones it holds itself."""
    classes = {kind for kind in result_kinds(layout.root) - result_kinds(before.root) if ":" in kind}
    return all(classes <= result_kinds(status.schema) for status, _ in statuses)
