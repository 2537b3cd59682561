"""One reduction, from each rank's prepared part to the same result, or the same error, on every rank.

1. Each rank places its leaves in the layout agreed before, and writes values into the group's buffer (`slots`).
2. `Agreement.sum` adds up, and tells whether all ranks made the same call on the same layout. If so: read the result;
   if the layout holds minima or maxima, one all_reduce(MAX) more.
3. If not, on every rank alike: `Agreement.tell` brings what each rank holds. `layout_agreement` raises, or yields a new
   layout; the numbers came with the statuses, so every rank adds them up itself (`summation`), and that is the result.
   Where they would be too many bytes for every rank to have, statuses come alone; then back to 1.
4. Numbers that float64 cannot hold (a product of value and weight, a sum over ranks) take the same way as new paths: in
   step 1 a rank that has one says "stale", in step 2 all ranks see the sum.
5. Where the call asks for every rank's values (`per_rank`), one all_gather more brings them (`columns`), once all ranks
   are known to have the layout; minima and maxima are then read from them.

What changes here (layouts, capacity, ages) changes only after all ranks have agreed, and is computed from what all
ranks know. So all ranks drop unused slots at the same call without a word to each other.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ddpstats._base import marks
from ddpstats._ranks.agreement import MAX_ROUNDS, Agreement, Call, Counters, status_of
from ddpstats._ranks.lanes import PARTIAL, WEIGHT, Seal, room_lanes
from ddpstats._ranks.status import Failure, are_in_step
from ddpstats._ranks.vectors import is_finite, pick, quotient
from ddpstats._reduction import held_keys, slots
from ddpstats._reduction.columns import Columns, column, too_large
from ddpstats._reduction.layout import Layout, Placement, Selection, place, result_kinds, select
from ddpstats._reduction.layout_agreement import Holdings, agree
from ddpstats._reduction.nesting import Builder, buildable, builder
from ddpstats._reduction.result import Reduced, finish, heavy_error, nonfinite_error, overflow_error, overflown
from ddpstats._reduction.schema import leaf_nodes
from ddpstats._reduction.site import RETENTION_CALLS, ReductionSite, Used
from ddpstats._reduction.summation import Share, Summation, extremes_from, extremes_of, lanes_of, nonfinite_slots
from ddpstats._reduction.tree import Structure
from ddpstats._reduction.values import Given, Part, too_small_or_large
from ddpstats._reduction.wire import (
    decode_holding,
    decode_numbers,
    decode_slots,
    encode_holding,
    encode_numbers,
    encode_slots,
    more_bytes,
    numbers_bytes,
)
from ddpstats.errors import NonFiniteStat, ProtocolMismatch


class _Summed(NamedTuple):
    """What the buffer says of one call: one entry per leaf of the selection."""

    selection: Selection
    sums: array[float]
    weights: array[float] | None
    total: float

    @property
    def divisor(self) -> float | array[float]:
        return self.total if self.weights is None else self.weights


class Reduction:
    """One reduction of one group. What ranks have in common before and after it is with the agreement.

    ``divide`` False leaves means as weighted sums; a matter of this rank alone.
    """

    def __init__(self, agreement: Agreement, call: Call, divide: bool, counters: Counters) -> None:
        self._agreement, self._group_name = agreement, agreement.group_name
        self._call, self._divide, self._counters = call, divide, counters
        kept = agreement.sites.get(call.site_key)
        self._site = kept if isinstance(kept, ReductionSite) else ReductionSite()

    def reduce(self, given: Given) -> Reduced:
        """Every rank must call. Raises what `_reduction.layout_agreement` raises, `NonFiniteStat`, and `CommFailed`."""
        self._counters.calls += 1
        prepared = given.part()
        for _ in range(MAX_ROUNDS):
            placement = self._write(prepared)
            agreed = self._agreement.sum(self._call, self._site, self._counters)
            if agreed:
                assert isinstance(prepared, Part)
                assert placement is not None
                reduced = self._read(prepared, placement)
                if reduced is not None:
                    return reduced
            together = self._renegotiate(prepared, placement, stale=agreed)
            if together is not None:
                assert isinstance(prepared, Part)
                return self._add_up(prepared, together)
        raise ProtocolMismatch(
            f"the ranks of {self._group_name} do not settle on a layout for name={self._call.name!r}: their stats or "
            "their versions of ddpstats change from one moment to the next",
            group=self._group_name,
        )

    # -- 1. write -----------------------------------------------------------------------------------------------------

    def _write(self, prepared: Part | Failure) -> Placement | None:
        placement = None if isinstance(prepared, Failure) else self._placement(prepared.structure)
        stale = self._is_stale(prepared, placement)
        weight = 0.0 if isinstance(prepared, Failure) else prepared.weight
        buffer, layout, seal = self._agreement.buffer, self._site.layout, self._agreement.seal(self._call, self._site)
        room = self._room(seal, prepared, placement)
        buffer.seal(seal, room, stale=stale, failed=placement is None, weight=weight)
        if isinstance(prepared, Part) and placement is not None and not stale:
            sums, weights, finite, mixed = prepared.sums, prepared.weights, prepared.finite, prepared.mixed
            if placement.whole and finite and isinstance(weights, float) and not mixed:
                buffer.lanes[PARTIAL] = 0.0
                slots.write(buffer, layout, sums, array("d", (weights,)) * layout.size, placement.codes)
            else:
                sums, weights, codes = lanes_of(layout, placement, sums, weights, finite, self._call.skips, mixed)
                slots.write(buffer, layout, sums, weights, codes)
        return placement

    def _is_stale(self, prepared: Part | Failure, placement: Placement | None) -> bool:
        """Whether this rank cannot say with the layout what it has to say."""
        if self._site.unbuildable or (placement is not None and placement.stale):
            return True
        return self._divide and isinstance(prepared, Part) and bool(prepared.scaled)

    def _placement(self, structure: Structure) -> Placement:
        known = self._site.placements.get(structure)
        if known is not None:
            return known
        seal = self._agreement.seal(self._call, self._site)
        needed = seal.status_bytes + len(structure.encoded) + numbers_bytes(structure.leaf_count)
        placement = replace(place(structure.schema, self._site.layout), room=room_lanes(needed))
        return self._site.placements.put(structure, placement, structure.leaf_count + 1)

    def _room(self, seal: Seal, prepared: Part | Failure, placement: Placement | None) -> tuple[float, float, float]:
        """Room for this rank's packet, should the ranks have to meet."""
        if isinstance(prepared, Failure):
            return seal.room_with(prepared.extra_bytes)
        assert placement is not None
        if not prepared.scaled and not prepared.mixed:
            return placement.room
        structure, more = prepared.structure, more_bytes(len(prepared.scaled), len(prepared.mixed))
        return seal.room_with(len(structure.encoded) + numbers_bytes(structure.leaf_count) + more)

    # -- 2. read ------------------------------------------------------------------------------------------------------

    def _read(self, part: Part, placement: Placement) -> Reduced | None:
        """The result; None where a sum over ranks was too large for a float64, on every rank alike."""
        call, layout, summed = self._call, self._site.layout, self._summed()
        # The selection is the same on every rank. Under per_rank extremes come with the values of all ranks.
        alone = not call.per_rank and not layout.extremes.keys().isdisjoint(summed.selection.slots)
        extremes = self._extremes(part, placement) if alone else {}
        if call.nonfinite == "raise" and summed.selection.nonfinite is not None:
            error = self._nonfinite_error(part, placement)
            self._end_call()
            raise error
        means, finite = quotient(summed.sums, summed.divisor) if self._divide else (summed.sums, True)
        overflows = [] if finite else overflown(summed.selection, means, summed.divisor, call.skips)
        if overflows:
            if self._agreement.meeting_room() is None:
                path = layout.names[summed.selection.slots[overflows[0]]]
                raise overflow_error(path, self._agreement.comm.ranks, self._group_name)
            return None
        columns = self._columns(part, placement)
        if columns is not None:
            extremes = columns.extremes(layout.extremes)
        values = finish(layout, summed.selection, means, summed.sums, summed.divisor, extremes)
        return self._result(part, summed, values, columns)

    def _add_up(self, part: Part, together: Summation) -> Reduced:
        """The result from what every rank told every rank: nothing more is sent, unless the call asks for columns."""
        together.write_to(self._agreement.buffer)
        layout, summed = self._site.layout, self._summed()
        selection = summed.selection
        if self._call.nonfinite == "raise" and selection.nonfinite is not None:
            self._end_call()
            held = [(slots, (self._agreement.comm.ranks[position],)) for position, slots in together.nonfinite()]
            raise nonfinite_error(layout, held, self._group_name)
        means, finite = quotient(summed.sums, summed.divisor) if self._divide else (summed.sums, True)
        mended = together.scaled_slots()
        if not finite:
            mended |= {selection.slots[i] for i in overflown(selection, means, summed.divisor, self._call.skips)}
        values = finish(layout, selection, means, summed.sums, summed.divisor, together.extremes())
        for slot in mended:
            values[selection.position_of[slot]] = together.exact(slot)
        return self._result(part, summed, values, self._columns(part, None))

    def _columns(self, part: Part, placement: Placement | None) -> Columns | None:
        """Every rank's values, where the call asks for them: one collective. All ranks have the layout by now.

        ``placement`` None: the layout is a new one.
        """
        call, layout, comm = self._call, self._site.layout, self._agreement.comm
        if not call.per_rank:
            return None
        error = too_large(layout, comm.ranks, call.name, self._group_name)
        if error is not None:
            self._end_call()
            raise error
        mine = column(layout, placement or self._placement(part.structure), part, call.skips)
        if not mine:
            return Columns(comm.ranks, ())
        self._agreement.count(self._counters, len(mine))
        return Columns(comm.ranks, comm.all_gather(mine, call.timeout_sec))

    def _result(
        self, part: Part, summed: _Summed, values: Sequence[float | bool | None], columns: Columns | None
    ) -> Reduced:
        call, layout, selection, ranks = self._call, self._site.layout, summed.selection, self._agreement.world_size
        build = self._builder(selection)
        reduced = Reduced(summed.total, layout, selection, values, summed.weights, ranks, build, columns)
        if held_keys.listeners:
            self._site.held_keys.take(call.name, layout, part.structure)
        self._end_call()
        if columns is not None and marks.listeners:
            mine = columns.ranks.index(self._agreement.comm.rank)
            of_path = reduced.flat_by_rank().items()
            marks.publish(
                marks.VALUES, call.name or call.kind, values={name: held.values[mine] for name, held in of_path}
            )
        return reduced

    def _summed(self) -> _Summed:
        site, buffer = self._site, self._agreement.buffer
        layout, total = site.layout, buffer.lane(WEIGHT)
        self._agreement.sites.setdefault(self._call.site_key, site)
        self._agreement.sites.move_to_end(self._call.site_key)
        if buffer.lane(PARTIAL) == 0:
            site.whole_call = site.calls
            selection, weights = layout.everything, None
        else:
            selection = self._selection(bytes(slots.codes_of(buffer, layout)))
            weights = pick(slots.weights_of(buffer, layout), selection.slots)
        if not math.isfinite(total) or not (weights is None or is_finite(weights)):
            self._end_call()
            raise heavy_error(layout, selection, total, weights, self._agreement.comm.ranks, self._group_name)
        return _Summed(selection, pick(slots.sums_of(buffer, layout), selection.slots), weights, total)

    def _builder(self, selection: Selection) -> Builder:
        builders = self._site.builders
        return builders.get(selection) or builders.put(selection, builder(selection.schema), len(selection.slots) + 1)

    def _selection(self, codes: bytes) -> Selection:
        site = self._site
        used = site.selections.get(codes)
        if used is None:
            selection = select(site.layout, memoryview(codes).cast("d").tolist())
            used = site.selections.put(codes, Used(selection, codes, site.calls), site.layout.size + 1)
        used.call = site.calls
        return used.selection

    def _extremes(self, part: Part, placement: Placement) -> dict[int, float]:
        """The second collective: minima as maxima of the negated values; who has no value sends minus infinity."""
        layout = self._site.layout
        mine = dict(extremes_of(layout, placement, part.sums, self._call.skips))
        held = [mine.get(slot, -math.inf) for slot in layout.extremes]
        tensor = torch.tensor(held, dtype=torch.float64, device="cpu")
        self._agreement.count(self._counters, tensor.numel() * 8)
        self._agreement.comm.all_reduce_max(tensor, self._call.timeout_sec)
        return extremes_from(layout, tensor.tolist())

    def _nonfinite_error(self, part: Part, placement: Placement) -> NonFiniteStat:
        """The summed lanes told every rank that some rank is non-finite; one exchange says which, and where."""
        layout, mine = self._site.layout, nonfinite_slots(placement, part.sums, part.mixed)
        told = self._agreement.exchange(encode_slots(mine), self._call, self._counters)
        held = [(decode_slots(payload, layout.size), ranks) for payload, ranks in told]
        return nonfinite_error(layout, held, self._group_name)

    def _end_call(self) -> None:
        self._site.calls += 1
        if self._site.calls % RETENTION_CALLS == 0:
            self._shrink()
        self._agreement.drop_oldest()

    def _shrink(self) -> None:
        site = self._site
        layout = site.without_unused(site.calls - RETENTION_CALLS)
        if layout is not site.layout:
            site.adopt(layout)
            self._agreement.resize()

    # -- 3. renegotiate -----------------------------------------------------------------------------------------------

    def _renegotiate(self, prepared: Part | Failure, placement: Placement | None, *, stale: bool) -> Summation | None:
        """Agree on a layout; returns all ranks' numbers where they came along and every rank can build the result."""
        call, site = self._call, self._site
        stale = stale or self._is_stale(prepared, placement)
        body = numbers = failure = None
        if isinstance(prepared, Failure):
            failure = prepared
        elif prepared.scaled and self._divide and self._agreement.meeting_room() is None:
            failure = too_small_or_large(prepared)
        else:
            body = encode_holding(site.unbuildable, prepared.structure.encoded)
            numbers = prepared.numbers(self._divide)
        status = status_of(call, site, failure, stale=stale, body=body)
        statuses, all_numbers = self._agreement.tell(call, status, self._counters, encode_numbers(numbers))
        holdings: Holdings = [(decode_holding(status.body), ranks) for status, ranks in statuses]
        before, base = site.layout, site.without_unused(site.oldest_kept())
        if not are_in_step(statuses):
            before = base = Layout()
            site.calls = 0
        layout = agree(holdings, base, self._group_name)
        self._adopt(layout)
        if held_keys.listeners:
            known = set(before.names.values())
            new_keys = [name for name in layout.names.values() if name not in known]
            for listener in tuple(held_keys.listeners):
                listener.renegotiated(call.name, new_keys)
        if all_numbers is None or not _all_can_build(layout, before, holdings):
            return None
        return self._summation(holdings, all_numbers)

    def _adopt(self, layout: Layout) -> None:
        site = self._site
        if layout.root != site.layout.root or layout.unbuildable != site.layout.unbuildable:
            site.adopt(layout)
            site.unbuildable = tuple(sorted(kind for kind in result_kinds(layout.root) if not buildable(kind)))
        self._agreement.keep(self._call, site)

    def _summation(self, holdings: Holdings, all_numbers: Sequence[bytes]) -> Summation | None:
        layout = self._site.layout
        numbers_of = dict(zip(self._agreement.comm.ranks, all_numbers, strict=True))
        shares: dict[int, Share] = {}
        for holding, ranks in holdings:
            placement, leaves = place(holding.schema, layout), sum(1 for _ in leaf_nodes(holding.schema))
            for rank in ranks:
                numbers = decode_numbers(numbers_of[rank], leaves)
                if numbers is None or placement.stale:
                    return None
                shares[rank] = Share(placement, numbers)
        return Summation(layout, [shares[rank] for rank in self._agreement.comm.ranks], self._call.skips)


def _all_can_build(layout: Layout, before: Layout, holdings: Holdings) -> bool:
    """Whether every rank is known to have every class of the user that a result may hold: new ones it holds itself."""
    classes = {kind for kind in result_kinds(layout.root) - result_kinds(before.root) if ":" in kind}
    return all(classes <= result_kinds(holding.schema) for holding, _ in holdings)
