"""What a window holds: everything that was added since the last flush, in memory for each path, not for each add.

1. Each path has a slot (`window_paths`).
2. An add of plain scalars in host memory becomes one row, kept with its weight (`window_rows`); some rows later they
   are summed up together.
3. Any other add is taken in at once: what is in host memory by `HostTotals`, what is on a device by its `DeviceTotals`.
   All of it is read and checked before anything changes, so that an add that fails leaves the window as it was.
4. `WindowContent.part` reads the devices, with one copy each, and makes of all sums this rank's part of a reduction.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import torch

from ddpstats._base import exact_sums
from ddpstats._base.exact_sums import SMALLEST, Scaled, as_fraction, scaled
from ddpstats._base.paths import format_path
from ddpstats._ranks.status import Failure
from ddpstats._ranks.vectors import are_summable, is_finite
from ddpstats._reduction.device_totals import LEAST, NONFINITE, SEEN, SUM, WEIGHT, WRONG, DeviceTotals, Update
from ddpstats._reduction.host_copy import HostCopy
from ddpstats._reduction.host_totals import HostTotals
from ddpstats._reduction.markers import Mean
from ddpstats._reduction.schema import leaf_nodes
from ddpstats._reduction.tree import Flat, Structure, flatten
from ddpstats._reduction.values import ON_META, Part, path_of
from ddpstats._reduction.window_leaves import LeavesRead, read_leaves
from ddpstats._reduction.window_paths import WEIGHT_SLOT, Placed, WindowPaths
from ddpstats._reduction.window_rows import LARGEST, Rows

_MOST_ROWS = 8  # of different structures: one that is used again later begins anew
_NO_FLAG = "a value, on a device, is not a flag; a flag is a bool, 0 or 1"
_NO_WEIGHT = "a weight, on a device, is negative or not finite; a weight is finite and not negative"
_TOO_LARGE = "the sum over the adds, on a device, of values times weights is too large; use weights closer to 1"
_TOO_HEAVY = "the weights of the adds add up to more than a float64 can hold. Divide them all by one number"


class WindowContent:
    """Since the last flush. ``skip``: the policy is ``nonfinite="skip"``."""

    def __init__(self, skip: bool) -> None:
        self._summed_up = 0
        self._skip = skip
        self._paths = WindowPaths()
        self._rows: OrderedDict[Structure, Rows] = OrderedDict()
        self._host = HostTotals(skip)
        self._host.reserve(self._paths.count)
        self._devices: dict[torch.device, DeviceTotals] = {}
        self._time_slots: dict[str, int] = {}

    @property
    def adds(self) -> int:
        """How many there were."""
        return self._summed_up + sum(len(rows.pending) for rows in list(self._rows.values()))

    # -- adding -------------------------------------------------------------------------------------------------------

    def add(self, flat: Flat, weight: Any, keys: list[Any] | None) -> Rows:
        """One add. Raises `CannotFlatten` and `SchemaConflict`, and then nothing has changed.

        Returns where the next add of the same structure may put its row; ``keys`` as `Rows` has them.
        """
        rows = self._rows.get(flat.structure)
        placed = None
        if rows is None:
            placed = self._paths.place(flat.structure)
            rows = Rows(flat.structure, placed.slots, flat.leaves, keys)
        row = rows.read(flat.leaves) if type(weight) in (float, int) and 0 < weight <= LARGEST else None
        if row is not None:
            self._keep(rows, placed)
            rows.weights.append(weight)
            rows.pending.append(row)
            if len(rows.weights) == rows.limit:
                self.sum_up(rows)
            return rows
        with torch.inference_mode():
            read = read_leaves(flat, rows.slots, weight, WEIGHT_SLOT)
            totals = {
                device: self._devices.get(device) or DeviceTotals(device, self._skip) for device in read.on_device
            }
            updates = [(device, totals[device].prepare(alike)) for device, alike in read.on_device.items()]
            self._keep(rows, placed)
            self._devices.update(totals)
            self._take_in(read, updates)
        return rows

    def add_time(self, name: str, seconds: float) -> None:
        """One use of a part of the step that is timed; not one of the adds. Raises `SchemaConflict`."""
        slot = self._time_slots.get(name)
        if slot is None:
            rows = self.add(flatten({"time": {name: Mean(seconds, 1.0)}}), 0.0, None)
            self._time_slots[name] = rows.slots[0]
            self._summed_up -= 1
        else:
            self._host.add(slot, "mean", seconds, 1.0)

    def _keep(self, rows: Rows, placed: Placed | None) -> None:
        if placed is None:
            self._rows.move_to_end(rows.structure)
            return
        self._paths.keep(rows.structure, placed)
        self._host.reserve(self._paths.count)
        self._rows[rows.structure] = rows
        if len(self._rows) > _MOST_ROWS:
            _, oldest = self._rows.popitem(last=False)
            self.sum_up(oldest)
            oldest.keys = None  # no add is recognised as one of these any more

    def _take_in(self, read: LeavesRead, updates: Iterable[tuple[torch.device, Update]]) -> None:
        for device, update in updates:
            self._devices[device].apply(update, self._paths.count)
        for slot, op, value, weight, exact in read.host:
            self._host.add(slot, op, value, weight, exact)
        self._host.weights[WEIGHT_SLOT] += read.weight
        self._summed_up += 1

    def sum_up(self, rows: Rows) -> None:
        """Make sums of the rows that are there."""
        if rows.pending:
            values, weights = rows.take()
            self._summed_up += len(weights)
            self._host.weights[WEIGHT_SLOT] += self._host.add_rows(rows.slots, values, weights)

    def sum_up_rows(self) -> None:
        """Make sums of all rows: an add of a structure that was there begins anew."""
        for rows in self._rows.values():
            self.sum_up(rows)
        self._rows.clear()

    # -- flushing -----------------------------------------------------------------------------------------------------

    def part(self, known: Structure | None, per_rank: bool) -> Part | Failure:
        """This rank's part of one reduction. ``known``: the structure of the last flush, to be used again."""
        self.sum_up_rows()
        structure, slots = self._paths.structure(known)
        try:
            self._read_devices(structure, slots)
            part = self._part(structure, slots)
            return part._replace(values=_own_values(part)) if per_rank else part
        except _CannotSum as error:
            path = () if error.leaf is None else path_of(structure, error.leaf)
            return Failure(format_path(path), str(error))

    def _read_devices(self, structure: Structure, slots: Sequence[int]) -> None:
        """Add what the devices hold to what is in host memory."""
        lanes = [totals.lanes for totals in self._devices.values()]
        if any(found.is_meta for found in lanes):
            held = next(i for i, slot in enumerate(slots) if slot < max(found.shape[1] for found in lanes))
            raise _CannotSum(held, f"the value is {ON_META}")
        for copy in HostCopy(lanes).wait(list(lanes), None)[0] if lanes else ():
            columns: list[list[float]] = copy.t().tolist()
            self._read_column(columns[WEIGHT_SLOT], None, WEIGHT_SLOT, "weight")
            for i, (slot, leaf) in enumerate(zip(slots, leaf_nodes(structure.schema), strict=True)):
                if slot < len(columns):
                    self._read_column(columns[slot], i, slot, leaf.op)

    def _read_column(self, column: list[float], leaf: int | None, slot: int, op: str) -> None:
        host, value = self._host, column[SUM]
        if column[WRONG]:
            raise _CannotSum(leaf, _NO_FLAG if op in ("any", "all") else _NO_WEIGHT)
        if op in ("min", "max"):
            value = column[LEAST] if op == "min" else -column[LEAST]
        if column[NONFINITE]:
            host.nonfinite.add(slot)
        elif not math.isfinite(value) and column[SEEN]:
            raise _CannotSum(leaf, _TOO_LARGE)
        if op == "weight":
            host.weights[slot] += column[WEIGHT]
        elif column[SEEN]:
            host.add(slot, op, value, column[WEIGHT])

    def _part(self, structure: Structure, slots: Sequence[int]) -> Part:
        host, weight = self._host, self._host.weights[WEIGHT_SLOT]
        sums, weights = (array("d", [lane[slot] for slot in slots]) for lane in (host.sums, host.weights))
        for leaf, one in zip((None, *range(len(slots))), (weight, *weights), strict=True):
            if one == math.inf:
                raise _CannotSum(leaf, _TOO_HEAVY)
        exact: dict[int, Scaled] = {}
        mixed: list[int] = []
        for i, slot in enumerate(slots if host.exact or host.nonfinite else ()):
            if slot in host.exact and math.isfinite(sums[i]):
                sums[i], found = _rounded(host.exact[slot] + Fraction(sums[i]))
                if found is not None:
                    exact[i] = found
            if slot in host.nonfinite and not host.seen[slot]:
                sums[i] = math.nan  # nothing of it counts
            elif slot in host.nonfinite and math.isfinite(sums[i]):
                mixed.append(i)
        if not are_summable(sums):
            for i, leaf in enumerate(leaf_nodes(structure.schema)):
                if leaf.op in ("mean", "sum") and exact_sums.LARGEST <= abs(sums[i]) < math.inf:
                    exact[i] = scaled(Fraction(sums[i]))
        alike = all(one == weight for one in weights)
        return Part(structure, sums, weight if alike else weights, weight, is_finite(sums), exact, mixed=tuple(mixed))


def _own_values(part: Part) -> array[float]:
    """What this rank alone would have as the result; NaN where it has no value."""
    found = array("d")
    for i, (leaf, total) in enumerate(zip(leaf_nodes(part.structure.schema), part.sums, strict=True)):
        weight = part.weights if isinstance(part.weights, float) else part.weights[i]
        exact = [as_fraction(part.scaled[i])] if i in part.scaled else None
        if weight == 0:
            own = math.nan
        elif leaf.op == "mean":
            own = total / weight if exact is None else exact_sums.mean(exact, [weight])
        elif leaf.op == "all":
            own = float(total == weight)
        elif leaf.op == "any":
            own = float(total > 0)
        else:
            own = total if exact is None else exact_sums.total(exact)
        found.append(own)
    return found


class _CannotSum(Exception):
    """What was found only now; ``leaf`` None: of the weight."""

    def __init__(self, leaf: int | None, message: str) -> None:
        super().__init__(message)
        self.leaf = leaf


def _rounded(total: Fraction) -> tuple[float, Scaled | None]:
    """As a float64, and with an exponent of its own where none can hold it."""
    try:
        found = float(total)
    except OverflowError:
        return 0.0, scaled(total)
    return (found, None) if not total or SMALLEST <= abs(found) < exact_sums.LARGEST else (0.0, scaled(total))
