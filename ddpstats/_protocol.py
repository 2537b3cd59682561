"""One reduction, from each rank's prepared part to the same result, or the same error, on every rank.

1. Each rank places its leaves in the layout agreed before, and writes values and control lanes into the group's buffer.
2. One all_reduce(SUM). It is never conditional: a rank that is stale or failed takes part and says so in its lanes.
3. Control lanes clean: all ranks made the same call on the same layout. Read the result; if the layout holds minima or
   maxima, one all_reduce(MAX) more.
4. Not clean, on every rank alike: exchange statuses (`_agreement`), which raises, or yields a new layout; back to 1.

What changes here (layouts, capacity, ages) changes only after all ranks have agreed, and is computed from what all
ranks know. So all ranks drop unused slots at the same call without a word to each other.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ddpstats._agreement import Statuses, agree
from ddpstats._buffer import FLAG, PARTIAL, WEIGHT, Buffer, Seal, capacity_for, lanes_needed, section_lanes
from ddpstats._cache import BoundedCache
from ddpstats._comm import Comm
from ddpstats._layout import NONFINITE, PRESENT, Layout, Placement, Selection, place, prune, result_kinds, select
from ddpstats._ranks import ranks_text
from ddpstats._reduced import Reduced, finish
from ddpstats._schema import EMPTY, iter_slots
from ddpstats._tree import Builder, Structure, buildable, builder
from ddpstats._values import Part, Prepared
from ddpstats._vector import pick
from ddpstats._wire import Failure, Status, decode_slots, decode_status, encode_slots, encode_status, fingerprint
from ddpstats.errors import InvalidStats, NonFiniteStat, ProtocolMismatch

# A slot that no rank used for this many calls of its name is dropped, so that generated key names cannot pile up; at a
# renegotiation, unused slots beyond this multiple of the used ones are dropped as well, the longest unused first.
RETENTION_CALLS = 256
_UNUSED_PER_USED, _UNUSED_AT_LEAST = 4, 1024

GATHER = "gather"
"""The kind of `Protocol.gather`'s calls."""

_RIDING_BYTES = 1 << 14  # of all ranks together: more than that is cheaper to send apart than to add up
_ROOM_PER_NEED = 4  # room that is larger than this multiple of what was needed last is given up

_MAX_SITES = 1024
_MAX_ROUNDS = 4
_MAX_PAYLOAD_BYTES = 1 << 30
_MAX_GATHERED_BYTES = 1 << 34  # of one rank
_HEAD = struct.Struct("<Q16s")
_LENGTH = struct.Struct("<Q")
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
        known = (
            {} if self.layout.root == EMPTY else dict(zip(iter_slots(self.layout.root), self.last_used, strict=True))
        )
        self.last_used = (
            array("q", (known.get(slot, self.calls) for slot in iter_slots(layout.root)))
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


class _DamagedError(Exception):
    """Bytes from a peer that are not what it announced."""


class Protocol:
    """All reductions of one group, one at a time. Not thread-safe: `_channel` puts calls in order."""

    def __init__(self, comm: Comm, group_name: str) -> None:
        self._comm, self._group_name = comm, group_name
        self.world_size, self.position = len(comm.ranks), comm.ranks.index(comm.rank)
        self._sites: OrderedDict[tuple[str, str | None], Site] = OrderedDict()
        self._buffer = Buffer(capacity_for(lanes_needed(0)))
        self._no_site = Site()  # decisions have no layout
        self.collectives = 0  # of this group so far: how ranks tell each other where they wait

    def reduce(self, call: Call, given: Prepared, divide: bool, counters: Counters) -> Reduced:
        """Every rank must call. Raises what `_agreement` raises, `NonFiniteStat`, and `CommFailed`.

        ``divide`` False leaves means as weighted sums; a matter of this rank alone.
        """
        counters.calls += 1
        prepared = given.part()
        site = self._sites.get(call.site_key) or Site()
        for _ in range(_MAX_ROUNDS):
            placement = self._write(call, site, prepared)
            if self._sum(call, site, counters):
                assert isinstance(prepared, Part)
                assert placement is not None
                return self._read(call, site, prepared, placement, divide, counters)
            self._renegotiate(call, site, prepared, placement, counters)
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
        self._buffer.seal(seal, stale=False, failed=failure is not None, flag=float(flag is True))
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
            self._buffer.seal(
                self._seal(call, site), stale=failure is None and mine is None, failed=failure is not None
            )
            if mine is not None and self._rides(site):
                self._buffer.write_section(self.position, self.world_size, mine)
            if self._sum(call, site, counters):
                assert mine is not None
                return self._parts(site, self._received(call, site, mine, counters))
            self._renegotiate(call, site, failure, None, counters, failure is None and mine is None)
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

    def _write(self, call: Call, site: Site, prepared: Part | Failure) -> Placement | None:
        placement = None if isinstance(prepared, Failure) else self._placement(site, prepared.structure)
        stale = bool(site.unbuildable) or (placement is not None and placement.stale)
        weight = 0.0 if isinstance(prepared, Failure) else prepared.weight
        self._buffer.seal(self._seal(call, site), stale=stale, failed=placement is None, weight=weight)
        if isinstance(prepared, Part) and placement is not None and not stale:
            if placement.whole and prepared.finite and isinstance(prepared.weights, float):
                self._buffer.write_whole(site.layout, prepared.sums, prepared.weights, placement.codes)
            else:
                self._write_partial(call, site, prepared, placement)
        return placement

    def _write_partial(self, call: Call, site: Site, part: Part, placement: Placement) -> None:
        sums, weights, codes = part.sums, part.weights, placement.codes
        if not part.finite:
            sums, codes = array("d", sums), array("d", codes)
            weights = array("d", [weights]) * len(sums) if isinstance(weights, float) else array("d", weights)
            skip = call.nonfinite == "skip"
            for i, slot in enumerate(placement.slots):
                if not math.isfinite(sums[i]):
                    codes[slot] += NONFINITE - (PRESENT if skip else 0)
                    if skip:
                        sums[i] = weights[i] = 0.0
        if site.layout.extremes:
            sums = array("d", sums)
            for i, slot in enumerate(placement.slots):
                if slot in site.layout.extremes and not math.isnan(sums[i]):
                    sums[i] = 0.0
        self._buffer.write_partial(site.layout, placement.slots, sums, weights, codes)

    def _placement(self, site: Site, structure: Structure) -> Placement:
        known = site.placements.get(structure)
        if known is not None:
            return known
        return site.placements.put(structure, place(structure.schema, site.layout), structure.leaf_count + 1)

    def _seal(self, call: Call, site: Site) -> Seal:
        seal = site.seals.get(call.seal_key)
        if seal is None:
            parts = ("" if part is None else "=" + part for part in call.seal_key)
            text = "\0".join(parts).encode("utf-8", "surrogatepass")
            seal = site.seals[call.seal_key] = Seal.of(
                fingerprint(text + b"\0" + _agreed_before(call, site)), self.world_size
            )
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
    ) -> Reduced:
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
        sums = pick(buffer.sums(layout), selection.slots)
        extremes = self._extremes(call, layout, part, placement, counters) if layout.extremes else {}
        values = finish(layout, selection, sums, total if weights is None else weights, extremes, divide)
        if call.nonfinite == "raise" and selection.nonfinite is not None:
            self._end_call(site)
            raise self._nonfinite_error(call, layout, part, placement, counters)
        build = self._builder(site, selection)
        reduced = Reduced(build(iter(values)), total, layout, selection, values, weights, self.world_size, build)
        self._end_call(site)
        return reduced

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
        sign = {slot: -1.0 if op == "min" else 1.0 for slot, op in layout.extremes.items()}
        counts = math.isfinite if call.nonfinite == "skip" else _is_number
        mine = {
            slot: sign[slot] * value
            for slot, value in zip(placement.slots, part.sums, strict=True)
            if slot in sign and placement.codes[slot] == PRESENT and counts(value)
        }
        tensor = torch.tensor([mine.get(slot, -math.inf) for slot in sign], dtype=torch.float64, device="cpu")
        self._count(counters, tensor.numel() * 8)
        self._comm.all_reduce_max(tensor, call.timeout_sec)
        return {slot: sign[slot] * value for slot, value in zip(sign, tensor.tolist(), strict=True)}

    def _nonfinite_error(
        self, call: Call, layout: Layout, part: Part, placement: Placement, counters: Counters
    ) -> NonFiniteStat:
        """The summed lanes told every rank that some rank is non-finite; one exchange says which, and where."""
        mine = [slot for slot, v in zip(placement.slots, part.sums, strict=True) if not math.isfinite(v)]
        ranks_of: dict[int, list[int]] = {}
        for payload, ranks in self._exchange(encode_slots(mine), call, counters):
            for slot in decode_slots(payload, layout.size):
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
        stale: bool = False,
    ) -> None:
        counters.renegotiations += 1
        status = Status(
            call=call.kind,
            name=call.name,
            nonfinite=call.nonfinite,
            failure=prepared if isinstance(prepared, Failure) else None,
            stale=stale or bool(site.unbuildable) or (placement is not None and placement.stale),
            layout=_agreed_before(call, site),
            unbuildable=site.unbuildable,
            schema=prepared.structure.schema if isinstance(prepared, Part) else EMPTY,
        )
        everyone = self._exchange(encode_status(status), call, counters)
        statuses: Statuses = [(decode_status(payload), ranks) for payload, ranks in everyone]
        layout = agree(statuses, site.without_unused(site.oldest_kept()), self._group_name)
        if len({status.layout for status, _ in statuses}) > 1:
            site.calls = 0
        site.adopt(layout)
        site.unbuildable = tuple(sorted(kind for kind in result_kinds(layout.root) if not buildable(kind)))
        self._sites[call.site_key] = site
        self._resize()

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


def _is_number(value: float) -> bool:
    return not math.isnan(value)
