"""One reduction, from each rank's part to the same result, or the same error, on every rank.

1. Each rank places its leaves in the layout agreed before, and writes sums, weights and codes into the group's buffer.
2. `Agreement.sum` adds up, and says whether all ranks made the same call on the same layout. If so: read the result;
   if some rank holds a minimum or maximum, one all_reduce(MAX) more.
3. If not, on every rank: `Agreement.exchange_statuses` brings what each rank holds, and `layout.agree` raises, or
   yields a new layout; then back to 1.
4. Where the call asks for every rank's values (``per_rank``), one all_gather more brings them.

What changes here (layouts, the buffer's size) changes only after all ranks have agreed, and is computed from what all
ranks know.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpstats._base import marks
from ddpstats._base.caches import EmptiedCache
from ddpstats._base.files import parse_json
from ddpstats._ranks.agreement import HEADER_LANES, PARTIAL, WEIGHT, Agreement, Seal, Site
from ddpstats._ranks.exchange import Call, Failure, Status, are_in_step, refuse
from ddpstats._reduction.flatten import Structure, decode
from ddpstats._reduction.layout import NONFINITE, PRESENT, Layout, Placement, Selection, agree, place, select
from ddpstats._reduction.ops import NONE, OPS
from ddpstats._reduction.read import MANY, Part, PartOnDevice, as_tensor
from ddpstats._reduction.result import Columns, Reduced, nonfinite_error
from ddpstats.errors import InvalidStats, ProtocolMismatch

# Of all ranks' values together, with ``per_rank``: 4,096 ranks with 7,281 slots each.
MAX_GATHERED_BYTES = 1 << 28

# How often a call is tried again after ranks have agreed on another layout.
_MAX_ROUNDS = 4

_COLUMN_BYTES = 9  # a float64, and whether there is one


@dataclass
class ReductionSite(Site):
    """The layout that all ranks agreed on for one name, and what this rank derived from it."""

    layout: Layout = field(default_factory=Layout)

    def __post_init__(self) -> None:
        self.placements: EmptiedCache[Structure, Placement] = EmptiedCache(64, 262_144)
        self.selections: EmptiedCache[bytes, Selection] = EmptiedCache(16, 65_536)

    @property
    def agreed(self) -> bytes:
        return self.layout.fingerprint

    @property
    def lanes(self) -> int:
        return HEADER_LANES + 2 * self.layout.size + self.layout.codes

    def adopt(self, layout: Layout) -> None:
        """Go over to ``layout``."""
        if (layout.leaves, layout.tags) != (self.layout.leaves, self.layout.tags):
            self.layout = layout
            self.seals.clear()
            self.placements.clear()
            self.selections.clear()

    def placement(self, structure: Structure) -> Placement | None:
        placement = self.placements.get(structure)
        if placement is None and (placement := place(structure, self.layout)) is not None:
            self.placements.keep(structure, placement, len(structure.leaves) + 1)
        return placement

    def selection(self, codes: bytes) -> Selection:
        known = self.selections.get(codes)
        if known is None:
            selection = select(self.layout, memoryview(codes).cast("d").tolist())
            known = self.selections.keep(codes, selection, self.layout.size + 1)
        return known


class Reduction:
    """One reduction of one group. What ranks have in common before and after it is with the agreement.

    ``divide`` False leaves means as weighted sums; a matter of this rank alone.
    """

    _agreement: Agreement
    _site: ReductionSite

    def __init__(
        self, call: Call, part: Part | Failure | PartOnDevice, counters: Counter[str], divide: bool = True
    ) -> None:
        self._call, self._part, self._counters, self._divide = call, part, counters, divide

    def perform(self, agreement: Agreement) -> Reduced:
        """Reduce. Every rank must call. Raises what all ranks raise, and `CommFailed`."""
        agreement.counters = self._counters
        self._counters["calls"] += 1
        kept = agreement.sites.get(self._call.site)
        self._agreement, self._site = agreement, kept if isinstance(kept, ReductionSite) else ReductionSite()
        prepared = self._part
        if isinstance(prepared, PartOnDevice):
            if agreement.world_size > 1:
                agreement.wait_for(prepared.has_arrived, "the copy of the stats to the host")
            prepared = prepared.read()
        for _ in range(_MAX_ROUNDS):
            seal = self._agreement.seal(self._call, self._site)
            placement = self._write(prepared, seal)
            if self._agreement.sum(seal):
                assert isinstance(prepared, Part)
                assert placement is not None
                return self._read(prepared, placement)
            self._renegotiate(prepared, placement)
        group_name = self._agreement.group_name
        raise ProtocolMismatch(
            f"the ranks of {group_name} do not settle on a layout for name={self._call.name!r}: a key has surrogates "
            "that JSON joins, or stats or versions of ddpstats change from one moment to the next",
            group=group_name,
        )

    # -- write --------------------------------------------------------------------------------------------------------

    def _write(self, prepared: Part | Failure, seal: Seal) -> Placement | None:
        buffer = self._agreement.buffer
        if isinstance(prepared, Failure):
            buffer.seal(seal, failed=True)
            return None
        placement = self._site.placement(prepared.structure)
        is_plain = prepared.is_finite and not prepared.nonfinite and isinstance(prepared.weights, float)
        is_whole = is_plain and placement is not None and placement.is_complete
        buffer.seal(seal, stale=placement is None, partial=not is_whole, weight=prepared.weight)
        if placement is not None:
            end_of_sums = HEADER_LANES + self._site.layout.size
            sums, rest = lanes_of(self._site.layout, placement, prepared, self._call.skips)
            buffer.lanes[HEADER_LANES:end_of_sums] = sums
            buffer.lanes[end_of_sums : end_of_sums + len(rest)] = rest
        return placement

    # -- read ---------------------------------------------------------------------------------------------------------

    def _read(self, part: Part, placement: Placement) -> Reduced:
        call, site, agreement, layout = self._call, self._site, self._agreement, self._site.layout
        buffer, start, size = agreement.buffer, HEADER_LANES, layout.size
        agreement.note_use(call, site)
        total, weights = buffer.lanes[WEIGHT], None
        if buffer.lanes[PARTIAL] == 0:
            selection = layout.everything
        else:
            selection = site.selection(bytes(buffer.lanes[start + 2 * size : site.lanes]))
            weights = _pick(buffer.lanes[start + size : start + 2 * size], selection.slots)
        sums = _pick(buffer.lanes[start : start + size], selection.slots)
        has_extremes = bool(layout.extremes) and not layout.extremes.keys().isdisjoint(selection.slots)
        extremes = self._extremes(part, placement) if has_extremes else {}
        if call.nonfinite == "raise" and selection.nonfinite is not None:
            raise self._nonfinite_error(part, placement)
        columns = self._columns(part, placement) if call.per_rank else None
        divisor = total if weights is None else weights
        values: Any = array("d", sums) if selection.special else sums
        if self._divide:
            values = _divide_by(values, divisor)
        if selection.special:
            values = _finish(selection, list(values), sums, divisor, extremes)
        reduced = Reduced(total, selection, values, weights, agreement.world_size, columns)
        if marks.listeners:
            self._publish(part, reduced, columns)
        return reduced

    def _extremes(self, part: Part, placement: Placement) -> dict[int, float]:
        """Return slot -> extreme; minima travel as maxima of the negated values, a rank without one sends -inf."""
        extremes = self._site.layout.extremes
        own = dict.fromkeys(extremes, -math.inf)
        for slot, value in zip(placement.slots, part.sums, strict=True):
            is_counted = math.isfinite(value) if self._call.skips else value == value
            if slot in extremes and placement.codes[slot] == PRESENT and is_counted:
                own[slot] = -value if extremes[slot] == "min" else value
        tensor = torch.tensor(list(own.values()), dtype=torch.float64, device="cpu")
        self._agreement.comm.all_reduce("max", tensor, self._agreement.begin(tensor.numel() * 8))
        largest = dict(zip(extremes, tensor.tolist(), strict=True))
        return {slot: -value if extremes[slot] == "min" else value for slot, value in largest.items()}

    def _nonfinite_error(self, part: Part, placement: Placement) -> Exception:
        """Exchange which rank is non-finite where: the summed codes say that some rank is."""
        layout, agreement = self._site.layout, self._agreement
        leaves = [index for index, value in enumerate(part.sums) if not math.isfinite(value)]
        own_slots = sorted(placement.slots[index] for index in {*leaves, *part.nonfinite})
        held = []
        for payload, ranks in agreement.exchange(json.dumps(own_slots).encode()):
            slots = parse_json(payload)
            if not isinstance(slots, list) or not all(type(slot) is int and 0 <= slot < layout.size for slot in slots):
                refuse("slots that are none")
            held.append((slots, ranks))
        return nonfinite_error(layout, held, agreement.group_name)

    def _columns(self, part: Part, placement: Placement) -> Columns:
        """Gather every rank's value of each slot."""
        agreement, size, ranks = self._agreement, self._site.layout.size, self._agreement.comm.ranks
        if size * _COLUMN_BYTES * len(ranks) > MAX_GATHERED_BYTES:
            each = size * _COLUMN_BYTES
            raise InvalidStats(
                f"per_rank=True would bring {each * len(ranks):,} bytes to every rank of {agreement.group_name}: "
                f"{each:,} of each rank, for all paths of name={self._call.name!r}. The limit is "
                f"{MAX_GATHERED_BYTES:,}.\nGive the paths that matter a name of their own. Nothing is returned; the "
                "reducer goes on working.",
                ranks=ranks,
                group=agreement.group_name,
            )
        values, is_held = array("d", bytes(8 * size)), bytearray(size)
        assert part.values is not None, "prepared without per_rank"
        for index, slot in enumerate(placement.slots):
            weight = part.weights if isinstance(part.weights, float) else part.weights[index]
            is_counted = not self._call.skips or math.isfinite(part.sums[index])
            if placement.codes[slot] == PRESENT and weight and is_counted:
                values[slot], is_held[slot] = part.values[index], 1
        if not size:
            return Columns(ranks, [], [])
        received = agreement.comm.all_gather(bytearray(values) + is_held, agreement.begin(size * _COLUMN_BYTES))
        columns = [bytes(column) for column in received]
        return Columns(ranks, [array("d", c[: 8 * size]) for c in columns], [c[8 * size :] for c in columns])

    def _publish(self, part: Part, reduced: Reduced, columns: Columns | None) -> None:
        call = self._call
        site = self._agreement.group_name, call.kind, call.name
        for listener in tuple(marks.listeners):
            listener.reduced(site, part.structure, self._site.layout)
        if columns is not None:
            position = columns.ranks.index(self._agreement.comm.rank)
            of_path = reduced.flat_by_rank().items()
            marks.publish(
                marks.VALUES, call.name or call.kind, values={name: held.values[position] for name, held in of_path}
            )

    # -- renegotiate --------------------------------------------------------------------------------------------------

    def _renegotiate(self, prepared: Part | Failure, placement: Placement | None) -> None:
        """Agree on a layout. Raises what is wrong with the call, on every rank."""
        site, agreement = self._site, self._agreement
        failure = prepared if isinstance(prepared, Failure) else None
        body = "[[],[]]" if isinstance(prepared, Failure) else prepared.structure.encoded
        is_stale = placement is None and failure is None
        status = Status(self._call, site.agreed, failure, is_stale, body)
        statuses = agreement.exchange_statuses(status)
        held = [(decode(status.body), ranks) for status, ranks in statuses]
        before = site.layout if are_in_step(statuses) else Layout()
        site.adopt(agree(held, before, agreement.group_name))
        agreement.keep(self._call, site)
        if marks.listeners:
            known = set(before.names)
            new_keys = [name for name in dict.fromkeys(site.layout.names) if name not in known]
            for listener in tuple(marks.listeners):
                listener.renegotiated(self._call.name, new_keys)


def lanes_of(layout: Layout, placement: Placement, part: Part, skip: bool) -> tuple[array[float], array[float]]:
    """Return one rank's sums in the order of the slots, and then its weights and codes.

    What ``skip`` leaves out is 0.
    """
    slots, sums, codes = placement.slots, part.sums, placement.codes
    is_clean = part.is_finite and not part.nonfinite
    if is_clean and not layout.extremes and part.weights == placement.last[0]:
        return _spread(layout.size, slots, sums), placement.last[1]
    weights = array("d", (part.weights,)) * len(sums) if isinstance(part.weights, float) else part.weights
    if not is_clean:
        sums, weights, codes = array("d", sums), array("d", weights), array("d", codes)
        for index in part.nonfinite:
            codes[slots[index]] += NONFINITE
        for index, slot in enumerate(slots):
            if not math.isfinite(sums[index]):
                codes[slot] += NONFINITE - (PRESENT if skip else 0)
                if skip:
                    sums[index] = weights[index] = 0.0
    if layout.extremes:
        sums = array("d", sums)
        for index, slot in enumerate(slots):
            if slot in layout.extremes and not math.isnan(sums[index]):
                sums[index] = 0.0
    rest = _spread(layout.size, slots, weights) + codes
    if is_clean and isinstance(part.weights, float):
        placement.last = part.weights, rest
    return _spread(layout.size, slots, sums), rest


def _finish(
    selection: Selection,
    values: list[Any],
    sums: Sequence[float],
    weights: float | array[float],
    extremes: Mapping[int, float],
) -> list[Any]:
    """Apply the ops of leaves that are no means."""
    for index, slot, op in selection.special:
        weight = weights if isinstance(weights, float) else weights[index]
        if op == NONE.name:
            values[index] = None
        elif weight == 0:  # every rank that holds it was left out as non-finite, or holds None
            values[index] = math.nan
        else:
            # The sum is NaN exactly where some rank's value is: a backend's own maximum depends on the order of ranks.
            total = extremes[slot] if slot in extremes and not math.isnan(sums[index]) else sums[index]
            values[index] = OPS[op].finish(total, weight)
    return values


# -- vectors of float64: plain Python for few elements, torch for many -------------------------------------------------


def _divide_by(sums: array[float], weights: float | array[float]) -> array[float]:
    """Return ``sums``, which are overwritten where they are many, divided by ``weights``; NaN where the weight is 0."""
    if len(sums) >= MANY:
        # 0 / 0 is NaN on its own; an entry of weight 0 adds nothing, so its sum is 0.
        as_tensor(sums).div_(weights if isinstance(weights, float) else as_tensor(weights))
        return sums
    if isinstance(weights, float):
        return array("d", [value / weights for value in sums] if weights else [math.nan] * len(sums))
    return array("d", [value / weight if weight else math.nan for value, weight in zip(sums, weights, strict=True)])


def _spread(size: int, slots: range | array[int], values: array[float]) -> array[float]:
    """Return a vector of ``size`` zeros with ``values[i]`` at ``slots[i]``; ``values`` itself where it fills that."""
    if isinstance(slots, range) and len(slots) == size:
        return values
    result = array("d", bytes(8 * size))
    if isinstance(slots, range):
        result[slots.start : slots.stop] = values
    elif len(values) >= MANY:
        as_tensor(result)[torch.frombuffer(slots, dtype=torch.int64)] = as_tensor(values)
    else:
        for slot, value in zip(slots, values, strict=True):
            result[slot] = value
    return result


def _pick(values: memoryview[float], slots: Sequence[int]) -> array[float]:
    """Return a copy of ``values`` at ``slots``."""
    if isinstance(slots, range):
        return array("d", values[slots.start : slots.stop].tobytes())
    return array("d", [values[slot] for slot in slots])
