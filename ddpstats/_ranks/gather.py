"""Every rank's tree of tensors, on every rank: what the integrations build on where states are not just averaged.

The control lanes prove that all ranks gather, and that the bytes agreed before are enough for each of them. Small trees
travel in the same collective, as numbers that every other rank adds zero to; large ones take a second collective, and
so do those that are to have a buffer of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpstats._base import config
from ddpstats._base.text import ranks_text
from ddpstats._ranks.agreement import MAX_ROUNDS, Agreement, Call, Counters, DamagedError, Site, status_of
from ddpstats._ranks.calls import channel_of
from ddpstats._ranks.comm import patience_sec
from ddpstats._ranks.lanes import HEADER_LANES, capacity_for, section_lanes
from ddpstats._ranks.status import AGREED_BYTES, GATHER, Failure
from ddpstats._ranks.tree_codec import CannotEncode, decode, encode
from ddpstats.errors import InvalidStats, ProtocolMismatch

_INLINE_BYTES = 1 << 14  # of all ranks together: more than that is cheaper to send by itself than to add up
_SLOT_PER_NEED = 4  # a slot that is larger than this multiple of what was needed last is given up
_MAX_GATHERED_BYTES = 1 << 34  # of one rank
_LENGTH = struct.Struct("<Q")

_counters = Counters()


def gather_trees(
    tree: Any,
    *,
    name: str,
    group: Any = None,
    dedicated_buffer: bool = False,
    timeout_sec: float | None = None,
) -> list[Any]:
    """Every rank's ``tree``, in the order of group ranks; the caller's own one is ``tree`` itself.

    Collective: every rank of ``group`` must call, with the same ``name``. One collective in steady state, two where all
    ranks' trees together take more than 16 kB, however many tensors there are and however ranks differ.

    Args:
        tree: dicts (keys str or int), lists and tuples of dense tensors (any shape and device), numbers, str, None; or
            a function without arguments that returns it, for what may fail on one rank.
        dedicated_buffer: the same on every rank for one ``name``. True for what is gathered rarely, beside calls in
            every step: it takes two collectives, and leaves the buffer of those calls small.
        timeout_sec: of the call; None: DDPSTATS_TIMEOUT_SEC, else 300.

    Returns:
        Tensors of other ranks are on the CPU, without grad; tuples and dicts of subclasses are plain ones.

    Raises:
        InvalidStats: some rank's tree holds something else, or could not be made; on every rank.
        ProtocolMismatch, RankMissing: as `ddpstats.StatsReducer`.
    """
    channel, timeout_sec = channel_of(group), config.timeout_sec(timeout_sec)
    payload, own, cause = _prepared(tree)
    call = Call(GATHER, name, "", patience_sec(timeout_sec))

    def work(agreement: Agreement) -> list[Any]:
        received = gather(agreement, call, payload, _counters, dedicated_buffer)
        return [own if i == agreement.position else decode(part) for i, part in enumerate(received)]

    try:
        return channel.run(work, timeout_sec)
    except InvalidStats as error:
        raise error from cause


def _prepared(tree: Any) -> tuple[bytearray | Failure, Any, BaseException | None]:
    """The bytes, the tree and no error; or why there are none. Whatever fails: this rank must still take part."""
    try:
        own = tree() if callable(tree) else tree
        return encode(own), own, None
    except CannotEncode as error:
        return Failure(error.path, str(error)), None, error.__cause__
    except Exception as error:
        return Failure("", f"{type(error).__name__}: {error}"), None, error


@dataclass
class GatherSite(Site):
    """What all ranks have in common for one name: how many bytes each of them has, its length included."""

    dedicated_buffer: bool = False
    slot_bytes: int = 0

    @property
    def agreed(self) -> bytes:
        return self.slot_bytes.to_bytes(AGREED_BYTES, "little")

    def is_inline(self, world_size: int) -> bool:
        """Whether the payloads travel in the collective that proves the call."""
        return not self.dedicated_buffer and self.slot_bytes * world_size <= _INLINE_BYTES

    def lanes(self, world_size: int) -> int:
        return section_lanes(world_size, self.slot_bytes) if self.is_inline(world_size) else HEADER_LANES

    def framed(self, payload: bytearray) -> bytearray | None:
        """The payload behind its length, padded to the slot; None where that is too small."""
        if _LENGTH.size + len(payload) > self.slot_bytes:
            return None
        framed = bytearray(self.slot_bytes)
        _LENGTH.pack_into(framed, 0, len(payload))
        framed[_LENGTH.size : _LENGTH.size + len(payload)] = payload
        return framed


def gather(
    agreement: Agreement, call: Call, payload: bytearray | Failure, counters: Counters, dedicated_buffer: bool = False
) -> list[memoryview]:
    """Every rank's payload, of any length, in the order of ranks. Every rank must call."""
    counters.calls += 1
    kept = agreement.sites.get(call.site_key)
    site = kept if isinstance(kept, GatherSite) else GatherSite(dedicated_buffer)
    for _ in range(MAX_ROUNDS):
        failure = payload if isinstance(payload, Failure) else None
        mine = site.framed(payload) if isinstance(payload, bytearray) else None
        stale = failure is None and mine is None
        seal = agreement.seal(call, site)
        room = seal.room if failure is None else seal.room_with(failure.extra_bytes)
        agreement.buffer.seal(seal, room, stale=stale, failed=failure is not None)
        if mine is not None and site.is_inline(agreement.world_size):
            agreement.buffer.write_section(agreement.position, agreement.world_size, mine)
        if agreement.sum(call, site, counters):
            assert mine is not None
            return _parts(agreement, site, _received(agreement, call, site, mine, counters))
        agreement.tell(call, status_of(call, site, failure, stale=stale), counters)
        agreement.keep(call, site)
        needed = len(payload) if isinstance(payload, bytearray) else 0
        _negotiate_slot_bytes(agreement, call, site, needed, counters)
    raise ProtocolMismatch(f"the ranks of {agreement.group_name} do not settle on a size", group=agreement.group_name)


def _received(
    agreement: Agreement, call: Call, site: GatherSite, mine: bytearray, counters: Counters
) -> Sequence[bytes | bytearray]:
    if site.is_inline(agreement.world_size):
        return agreement.buffer.sections(agreement.world_size, site.slot_bytes)
    agreement.count(counters, site.slot_bytes)
    return agreement.comm.all_gather(mine, call.timeout_sec)


def _parts(agreement: Agreement, site: GatherSite, received: Sequence[bytes | bytearray]) -> list[memoryview]:
    lengths = [_LENGTH.unpack_from(part)[0] for part in received]
    start, most = _LENGTH.size, max(lengths)
    if most + start > site.slot_bytes:
        raise DamagedError(f"a peer announces {most} bytes where {site.slot_bytes} were agreed")
    if slot_bytes_for(most) * _SLOT_PER_NEED < site.slot_bytes:  # once large, now small: all ranks see it alike
        _set_slot_bytes(agreement, site, slot_bytes_for(most))
    return [memoryview(part)[start : start + length] for part, length in zip(received, lengths, strict=True)]


def _negotiate_slot_bytes(agreement: Agreement, call: Call, site: GatherSite, needed: int, counters: Counters) -> None:
    agreement.count(counters, _LENGTH.size)
    comm = agreement.comm
    sizes = [_LENGTH.unpack(part)[0] for part in comm.all_gather(_LENGTH.pack(needed), call.timeout_sec)]
    if max(sizes) > _MAX_GATHERED_BYTES:
        ranks = [rank for rank, size in zip(comm.ranks, sizes, strict=True) if size > _MAX_GATHERED_BYTES]
        raise InvalidStats(
            f"{ranks_text(ranks)} would send {max(sizes):,} bytes to every rank; the limit is {_MAX_GATHERED_BYTES:,}",
            ranks=ranks,
            group=agreement.group_name,
        )
    _set_slot_bytes(agreement, site, slot_bytes_for(max(sizes)))


def _set_slot_bytes(agreement: Agreement, site: GatherSite, slot_bytes: int) -> None:
    site.slot_bytes = slot_bytes
    site.seals.clear()
    agreement.resize()


def slot_bytes_for(size: int) -> int:
    """Room for ``size`` bytes and their length, with some to grow."""
    return 16 * capacity_for(-(-(size + _LENGTH.size) // 16))
