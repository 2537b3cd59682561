"""The content of a window: everything that was added since the last flush, in memory for each path, not for each add.

1. Each leaf has a slot. An add becomes one row for each device that its leaves are on; most have one, in host memory.
2. Some rows later they are stacked and folded into that device's lanes, slot by slot. No device is waited for.
3. `WindowContent.part` copies the lanes to the host, once for each device, and makes one rank's part of a reduction.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ddpstats._base.caches import BoundedCache
from ddpstats._base.lazy import refuse_without_values
from ddpstats._base.paths import Path, format_path
from ddpstats._reduction.flatten import INTERCHANGEABLE, LIST, CannotRead, Flat, LeafKey, Structure, Tag, flatten
from ddpstats._reduction.layout import describe, merge_sorts, sorts_of
from ddpstats._reduction.ops import NONE, OPS, Marker, Mean, Op, identity
from ddpstats._reduction.read import (
    HEAVIEST,
    LARGEST,
    LIGHTEST,
    WRONG_VALUE,
    WRONG_WEIGHT,
    HostCopy,
    Part,
    accelerator_in_use,
    are_finite,
    are_small,
    cannot_read,
    check_lengths,
    elements_of,
    read_leaf,
    read_plain,
    read_weight,
    refuse_tensor,
)
from ddpstats.errors import ConfigError, SchemaConflict

_MOST_ROWS, _MOST_NUMBERS = 512, 16_384  # of one structure, before they are folded
_MOST_STRUCTURES = 8  # with rows; the rows of one that is not used any more are folded
_TOTAL = 0  # the slot of the weights of the adds themselves

# The lanes of a device: what is added up for each slot, and the smallest value (of a maximum the negated one).
SUM, WEIGHT, NONFINITE, SEEN, WRONG, LEAST = range(6)


Weights = list[float] | torch.Tensor
"""The weight of each leaf of a row; a tensor where some of them are on a device."""


@dataclass
class _Rows:
    """The adds of one structure whose leaves are on one device, until they are folded.

    Attributes:
        is_scaled: each of ``sums`` holds sums; else values, which are yet to be multiplied by their weights.
        sums: of each add; an array on the host, a tensor on a device.
        weights: of each add; a float is the weight of all means, while all other leaves have 1.
    """

    device: torch.device
    slots: Sequence[int]
    ops: list[Op]
    is_scaled: bool
    sums: list[Any] = field(default_factory=list)
    weights: list[Weights | float] = field(default_factory=list)

    def __post_init__(self) -> None:
        width, device = max(1, len(self.slots)), self.device
        self.limit = max(1, min(_MOST_ROWS, _MOST_NUMBERS // width))
        self.at = _to_device(list(self.slots), torch.int64, device)
        self.is_weighted = _to_device([op.is_weighted for op in self.ops], torch.bool, device)
        self.is_flag = _to_device([op.is_flag for op in self.ops], torch.bool, device)
        self.is_extreme = _to_device([op.over != "sum" for op in self.ops], torch.bool, device)
        self.sign = _to_device([-1.0 if op.over == "max" else 1.0 for op in self.ops], _wide(device), device)


class _Recent(NamedTuple):
    """The last add, a flat dict of numbers in host memory: another one of these is recognised by its keys and types."""

    structure: Structure
    rows: _Rows
    keys: list[str]
    types: list[type]


class WindowContent:
    """Everything that was added since the last flush, in memory for each path, not for each add."""

    def __init__(self, skip: bool) -> None:
        self.adds = 0
        self.device_times: deque[tuple[str, float, Any, Any]] = deque()
        self._skip = skip
        self._total = 0.0
        self._slot_of: dict[LeafKey, int] = {}
        self._tags: dict[Tag, None] = {}
        self._sorts: dict[Path, str] = {}
        self._structures: dict[Structure, None] = {}  # those that are known to fit
        self._rows: dict[Any, _Rows] = {}
        self._recent: _Recent | None = None
        self._lanes: dict[torch.device, _Lanes] = {}

    # -- adding -------------------------------------------------------------------------------------------------------

    def add_again(self, stats: Any, weight: Any) -> bool:
        """Take one add of numbers in host memory that has the keys and types of the add before; False for any other."""
        recent = self._recent
        is_number = type(weight) is float or type(weight) is int  # not by a call: each shows in what an add costs
        if recent is None or type(stats) is not dict or [*stats] != recent.keys or not is_number:
            return False
        if not LIGHTEST <= weight <= HEAVIEST:
            return False
        leaves = [*stats.values()]
        if [*map(type, leaves)] != recent.types:
            return False
        return self._add_row(Flat(recent.structure, leaves), weight, recent.rows)

    def _add_row(self, flat: Flat, weight: float, rows: _Rows | None) -> bool:
        """Take one add as a row, if its leaves can be read together; False if they cannot."""
        if accelerator_in_use() and any(_device_of_leaf(leaf, OPS["mean"], None) is not None for leaf in flat.leaves):
            return False
        row = _read_row(flat, weight)
        if row is None:
            return False
        if rows is None:
            self._learn(flat.structure)
            rows = self._rows_of(flat.structure, _HOST, None)
        if row[0]:
            self._append(rows, *row)
        self._total += weight
        self.adds += 1
        return True

    def add(self, stats: Any, weight: Any) -> None:
        """Take one add. Raises `CannotRead` and `SchemaConflict`, and then nothing has changed."""
        flat = flatten(stats)
        structure, self._recent = flat.structure, None
        if structure not in self._structures:
            self._refuse_conflict(structure)
        if not _is_plain_weight(weight) or not self._add_row(flat, weight, None):
            self._add_leaves(flat, weight)
        elif type(stats) is dict and len(stats) == len(flat.leaves) and {*map(type, stats)} == {str}:
            rows = self._rows_of(structure, _HOST, None)
            if len(rows.slots) == len(flat.leaves):  # a marker around None has the type of one around a value
                self._recent = _Recent(structure, rows, [*stats], [*map(type, flat.leaves)])

    def add_time(self, name: str, seconds: float) -> None:
        """Take one use of a part of the step that is timed; it is not one of the adds."""
        self._add_leaves(flatten({"time": {name: Mean(seconds, 1.0)}}), 0.0)
        self.adds -= 1

    def read_device_times(self, wait: bool = False) -> None:
        """Add the times that the device has reached by now; ``wait``: all of them."""
        while self.device_times and (wait or self.device_times[0][3].query()):
            name, seconds, start_event, end_event = self.device_times.popleft()
            end_event.synchronize()
            self.add_time(name, max(seconds, start_event.elapsed_time(end_event) / 1000))

    def _refuse_conflict(self, structure: Structure) -> None:
        conflicts = [path for path, sort in sorts_of(structure).items() if self._sorts.get(path, sort) != sort]
        if not conflicts:
            return
        path, earlier = conflicts[0], self._structure(None)
        more = f" (and at {len(conflicts) - 1} more paths)" if len(conflicts) > 1 else ""
        raise SchemaConflict(
            f"stats that do not fit the earlier ones of this window at {format_path(path)!r}{more}: "
            f"{describe(earlier, path)} before, {describe(structure, path)} now.\n"
            "Give each path one structure and one reduce op, or use different keys. Nothing was added; the window goes "
            "on working.",
            path=format_path(path) or None,
        )

    def _learn(self, structure: Structure) -> None:
        if structure in self._structures:
            return
        merge_sorts(self._sorts, structure)
        for key in structure.leaves:
            self._slot_of.setdefault(key, len(self._slot_of) + 1)
        self._tags.update(dict.fromkeys(structure.tags))
        if len(self._structures) >= _MOST_STRUCTURES:
            self._structures.pop(next(iter(self._structures)))
        self._structures[structure] = None

    def _rows_of(self, structure: Structure | None, device: torch.device, indexes: tuple[int, ...] | None) -> _Rows:
        """Return where the next row of these leaves goes; ``indexes`` None: all leaves but those that are None."""
        key = (structure, device, indexes)
        rows = self._rows.get(key)
        if rows is None:
            if structure is None:  # the weight of a call
                rows = _Rows(device, [_TOTAL], [OPS["sum"]], True)
            else:
                held = range(len(structure)) if indexes is None else indexes
                leaves = [structure.leaves[index] for index in held if structure.leaves[index][1] != NONE.name]
                slots, ops = [self._slot_of[leaf] for leaf in leaves], [OPS[op] for _, op in leaves]
                rows = _Rows(device, slots, ops, is_scaled=indexes is not None)
            if len(self._rows) >= _MOST_STRUCTURES:
                self._fold(self._rows.pop(next(iter(self._rows))))
                self._recent = None
            self._rows[key] = rows
        return rows

    def _add_leaves(self, flat: Flat, weight: Any) -> None:
        """Read leaf by leaf: numbers in host memory now, tensors on a device without waiting for it."""
        structure = flat.structure
        weight_device = _device_of(weight)
        total, elements = read_weight(weight) if weight_device is None else (0.0, None)
        weight_row = None if weight_device is None else _read_device_weight(weight)
        host_indexes, host_sums, host_weights = list[int](), array("d"), list[float]()
        groups: dict[torch.device, list[int]] = {}
        for index, leaf in enumerate(flat.leaves):
            if structure.leaves[index][1] == NONE.name:
                continue
            device = _device_of_leaf(leaf, OPS[structure.leaves[index][1]], weight_device)
            if device is not None:
                groups.setdefault(device, []).append(index)
                continue
            summed, own_weight, _ = read_leaf(leaf, structure, index, total, elements)
            host_indexes.append(index)
            host_sums.append(summed)
            host_weights.append(own_weight)
        call_weight = weight if weight_device is not None else elements or total
        with torch.inference_mode():
            device_rows = [
                (device, tuple(indexes), _read_on_device(flat, indexes, device, call_weight))
                for device, indexes in groups.items()
            ]
        self._refuse_conflict(structure)
        self._learn(structure)
        if host_indexes:
            self._append(self._rows_of(structure, _HOST, tuple(host_indexes)), host_sums, host_weights)
        for device, indexes, (sums, weights) in device_rows:
            self._append(self._rows_of(structure, device, indexes), sums, weights)
        if weight_device is not None and weight_row is not None:
            self._append(self._rows_of(None, weight_device, None), weight_row, weight_row)
        self._total += total
        self.adds += 1

    def _append(self, rows: _Rows, sums: Any, weights: Weights | float) -> None:
        if len(rows.sums) >= rows.limit:
            self._fold(rows)
        rows.sums.append(sums)
        rows.weights.append(weights)

    def _fold(self, rows: _Rows) -> None:
        if rows.sums:
            refuse_without_values("StatsWindow.add")  # what is folded then would have no values
            lanes = self._lanes.get(rows.device)
            if lanes is None:
                lanes = self._lanes[rows.device] = _Lanes(rows.device, self._skip)
            lanes.fold(rows, 1 + len(self._slot_of))
            rows.sums, rows.weights = [], []

    def fold_all(self) -> None:
        """Fold all rows: an add of a structure that was there begins with an empty row again."""
        for rows in self._rows.values():
            self._fold(rows)
        self._rows.clear()
        self._recent = None

    # -- flushing -----------------------------------------------------------------------------------------------------

    def part(self, known: Structure | None, per_rank: bool) -> Part:
        """Return this rank's part of one reduction. ``known``: the structure of the last flush, to be used again.

        Raises `CannotRead` for what was found only now.
        """
        self.fold_all()
        structure = self._structure(known)
        sums, weights, nonfinite = array("d"), array("d"), []
        columns = self._columns()
        total = self._total + _checked_weight(columns[_TOTAL], ())
        for index, (path, op_name) in enumerate(structure.leaves):
            op, column = OPS[op_name], columns[self._slot_of[path, op_name]]
            weights.append(_checked_weight(column, path))
            if column[WRONG]:
                raise CannotRead(path, _WRONG_FLAG if op.is_flag else _WRONG_DEVICE_VALUE)
            value = column[SUM]
            if op.over != "sum" and not math.isnan(value):
                value = column[LEAST] if op.over == "min" else -column[LEAST]
            if column[NONFINITE]:
                if not column[SEEN]:
                    value = math.nan  # nothing of it counts
                elif math.isfinite(value):
                    nonfinite.append(index)
            sums.append(value if column[SEEN] or column[NONFINITE] else 0.0)
        values = None
        if per_rank:
            finished = zip(structure.leaves, sums, weights, strict=True)
            own = [OPS[op].finish(value, weight) if weight else math.nan for (_, op), value, weight in finished]
            values = array("d", own)
        one_weight: float | array[float] = total if all(weight == total for weight in weights) else weights
        return Part(structure, sums, one_weight, total, are_finite(sums), values, tuple(nonfinite))

    def _structure(self, known: Structure | None) -> Structure:
        """Return one structure of all adds; ``known`` itself, or that of an add, where it is equal."""
        leaves = tuple(key for key in self._slot_of if key[1] != NONE.name or key[0] not in self._sorts)
        kinds: dict[Path, str] = {}
        for path, tag in self._tags:
            kinds[path] = LIST if kinds.get(path, tag) != tag else tag
        tags = tuple(kinds.items())
        for structure in (*self._structures, known):
            if structure is not None and structure.leaves == leaves and structure.tags == tags:
                return structure
        return Structure(leaves, tags)

    def _columns(self) -> list[list[float]]:
        """Return what each slot holds, over all devices: one copy for each of them."""
        held = [lanes.lanes for lanes in self._lanes.values()]
        for device, lanes in self._lanes.items():
            if device.type == "meta":
                paths = [path for (path, _), slot in self._slot_of.items() if slot == lanes.first_slot]
                raise CannotRead(paths[0] if paths else (), f"the value is on the device {device}, and {_NO_VALUE}")
        columns = [[0.0, 0.0, 0.0, 0.0, 0.0, math.inf] for _ in range(1 + len(self._slot_of))]
        for tensor in HostCopy(held).wait(list(held), None)[0] if held else ():
            for column, more in zip(columns, tensor.t().tolist(), strict=False):
                for lane in range(LEAST):
                    column[lane] += more[lane]
                column[LEAST] = min(column[LEAST], more[LEAST])
        return columns


_HOST = torch.device("cpu")
_MOST = LARGEST * (1 + 1e-9)  # of a weighted mean of values, which are rounded
_NO_VALUE = "meta tensors have a shape but no value; pass a tensor with values"
_WRONG_FLAG = "a value, on a device, is not a flag; a flag is a bool, 0 or 1"
_WRONG_DEVICE_VALUE = f"a value, on a device, is too large: {WRONG_VALUE}"


def _checked_weight(column: list[float], path: Path) -> float:
    if math.isnan(column[WEIGHT]):
        raise CannotRead(path, f"a weight, on a device, is not one: {WRONG_WEIGHT}")
    return column[WEIGHT]


class _Lanes:
    """The lanes of one device [6, slots]. ``skip``: what is not finite is left out, and only counted.

    float64, but where the device has none. What comes from host memory goes through pinned memory, so that nothing
    waits for the device.
    """

    def __init__(self, device: torch.device, skip: bool) -> None:
        self._device, self._skip = device, skip
        self.lanes = self._empty(0)
        self.first_slot: int | None = None  # of those that were ever folded
        self._stream: Any = None

    def __deepcopy__(self, memo: object) -> _Lanes:
        """Copy in the order of the adds, and without a wait for the device."""
        self._follow_stream()
        made = _Lanes(self._device, self._skip)
        made.lanes, made._stream = self.lanes.clone(), self._stream
        return made

    def __reduce__(self) -> Any:
        if self._device != _HOST:
            raise ConfigError(
                f"a StatsWindow that added up on {self._device} cannot go to another process; flush first"
            )
        return _lanes_from, (self._skip, self.lanes.tolist())

    def _empty(self, count: int) -> torch.Tensor:
        lanes = torch.zeros(LEAST + 1, count, dtype=_wide(self._device), device=self._device)
        lanes[LEAST] = math.inf
        return lanes

    def fold(self, rows: _Rows, count: int) -> None:
        """Add the rows; there are slots below ``count`` by now."""
        with torch.inference_mode():
            self._follow_stream()
            if self.first_slot is None:
                self.first_slot = min(rows.slots)
            if self.lanes.shape[1] < count:
                self.lanes = torch.cat([self.lanes, self._empty(count - self.lanes.shape[1])], 1)
            width = len(rows.slots)
            is_on_host = isinstance(rows.sums[0], array)
            if is_on_host:
                sums = torch.frombuffer(bytearray().join(rows.sums), dtype=torch.float64).view(-1, width)
            else:
                sums = torch.stack(rows.sums)
            weights = self._weights(rows)
            if not rows.is_scaled:
                sums = sums * weights
            finite = sums.isfinite()
            counted = finite if self._skip else torch.ones_like(finite)
            is_extreme = counted & rows.is_extreme & ~sums.isnan()
            wrong = rows.is_flag & (sums != 0) & (sums != 1)
            if not is_on_host:  # where each value was looked at
                wrong |= finite & (sums.abs() > _MOST * weights)
            added = sums.where(counted & ~is_extreme, 0.0)
            parts = [added, weights.where(counted | weights.isnan(), 0.0), ~finite, counted, wrong]
            self.lanes[:LEAST].index_add_(1, rows.at, torch.stack([part.to(sums).sum(0) for part in parts]))
            least = (sums * rows.sign).where(is_extreme, math.inf).amin(0)
            self.lanes[LEAST, rows.at] = torch.minimum(self.lanes[LEAST, rows.at], least)

    def _weights(self, rows: _Rows) -> torch.Tensor:
        """Return [adds, leaves]; a float is the weight of all means, while all other leaves have 1."""
        wide, weights = _wide(self._device), rows.weights
        if {*map(type, weights)} == {float}:
            return self._from_host(weights, wide).unsqueeze(1).where(rows.is_weighted, 1.0)
        each = [_weight_each(weight, rows.ops) if isinstance(weight, float) else weight for weight in weights]
        if not any(isinstance(weight, torch.Tensor) for weight in each):
            return self._from_host(each, wide)
        return torch.stack([w if isinstance(w, torch.Tensor) else self._from_host(w, wide) for w in each])

    def _from_host(self, numbers: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """Return a copy on the device that is not waited for."""
        return _to_device(numbers, dtype, self._device)

    def _follow_stream(self) -> None:
        """Change the lanes in the order of the adds, which may come from different streams."""
        if self._device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError("StatsWindow.add while a CUDA graph is captured: only its replays compute. Add outside.")
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def _lanes_from(skip: bool, lanes: list[list[float]]) -> _Lanes:
    made = _Lanes(_HOST, skip)
    made.lanes = torch.tensor(lanes, dtype=torch.float64, device=_HOST)
    return made


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


def _to_device(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a copy on the device that is not waited for."""
    host = torch.tensor(numbers, dtype=dtype, device=_HOST, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


# -- reading one add --------------------------------------------------------------------------------------------------


def _device_of(value: Any) -> torch.device | None:
    """Return the device of a tensor that is not in host memory, else None."""
    return value.device if isinstance(value, torch.Tensor) and not value.is_cpu else None


def _device_of_leaf(leaf: Any, op: Op, weight_device: torch.device | None) -> torch.device | None:
    """Return where the leaf must be added up: where its value is, or its weight; None for host memory."""
    device = _device_of(leaf.value if isinstance(leaf, Marker) else leaf)
    if device is not None or not op.is_weighted:
        return device
    own_weight = leaf.weight if isinstance(leaf, Mean) else None
    return weight_device if own_weight is None else _device_of(own_weight)


class _Plan:
    """A plan to read the leaves of one structure together."""

    def __init__(self, flat: Flat) -> None:
        ops = flat.structure.ops
        self.indexes = [index for index, op in enumerate(ops) if op is not NONE]
        self.ops = [ops[index] for index in self.indexes]
        self.is_usable = all(op.prepare is identity for op in self.ops)
        leaves = [flat.leaves[index] for index in self.indexes]
        self.markers = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Marker)]
        self.means = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Mean)]
        self.flags = [index for index, op in enumerate(self.ops) if op.is_flag]
        self._known = list[type](), list[int]()  # one attribute, for windows of several threads share the plan

    def find_tensors(self, values: list[Any]) -> list[int] | None:
        """Return the indexes of tensors; None where a value is neither a number nor a tensor."""
        types = [*map(type, values)]
        known, tensors = self._known
        if types != known:
            if not self.is_usable or not {*types} <= INTERCHANGEABLE:
                return None
            tensors = [index for index, kind in enumerate(types) if kind is torch.Tensor]
            self._known = types, tensors
        return tensors


_plans: BoundedCache[Structure, _Plan] = BoundedCache(max_entries=64, max_cost=65_536)


def _read_row(flat: Flat, weight: float) -> tuple[array[float], float | list[float]] | None:
    """Return value and weight of each leaf that is not None; None where leaves must be read one by one."""
    values = read_plain(flat)
    own_weights: dict[int, Any] = {}
    if values is None:
        plan = _plans.get(flat.structure) or _plans.put(flat.structure, _Plan(flat), len(flat.structure) + 1)
        leaves = [flat.leaves[index] for index in plan.indexes]
        own_weights = {index: leaves[index].weight for index in plan.means if leaves[index].weight is not None}
        for index in plan.markers:
            leaves[index] = leaves[index].value
        tensors = plan.find_tensors(leaves)
        if tensors is None or not all(map(_is_plain_weight, own_weights.values())):
            return None
        try:
            for index in tensors:
                leaves[index] = leaves[index].item()
            values = array("d", leaves)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            return None
        if any(values[index] not in (0.0, 1.0) for index in plan.flags):
            return None
    if not are_small(values, LARGEST) and any(LARGEST < abs(value) < math.inf for value in values):
        return None
    if not own_weights:
        return values, float(weight)
    weights = _weight_each(weight, plan.ops)
    for index, own_weight in own_weights.items():
        weights[index] = float(own_weight)
    return values, weights


def _is_plain_weight(weight: Any) -> bool:
    return (type(weight) is float or type(weight) is int) and LIGHTEST <= weight <= HEAVIEST


def _weight_each(weight: float, ops: list[Op]) -> list[float]:
    """Return the weight of each leaf whose marker has no weight."""
    return [weight if op.is_weighted else 1.0 for op in ops]


def _read_device_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the total weight [1] on its device; NaN where an element cannot be a weight."""
    try:
        refuse_tensor(weight)
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise CannotRead((), f"the weight is {reason}; it is a real number or a 1-d tensor") from None
    return _total_weight(_vector(weight, weight.device)).reshape(1)


def _total_weight(weights: torch.Tensor) -> torch.Tensor:
    is_legal = (weights == 0) | ((weights >= LIGHTEST) & (weights <= HEAVIEST))
    return weights.sum().where(is_legal.all(), math.nan)


def _read_on_device(
    flat: Flat, indexes: list[int], device: torch.device, call_weight: Any
) -> tuple[torch.Tensor, Weights]:
    """Return sums [leaves] on the device, and weights."""
    ops = [flat.structure.ops[index] for index in indexes]
    leaves = [flat.leaves[index] for index in indexes]
    first = leaves[0]
    if (
        isinstance(call_weight, float)
        and call_weight > 0
        and all(op is OPS["mean"] for op in ops)
        and {*map(type, leaves)} == {torch.Tensor}
        and len({(leaf.dtype, leaf.shape, leaf.layout) for leaf in leaves}) == 1
        and first.numel() == 1
        and first.layout is torch.strided
    ):
        try:
            refuse_tensor(first)
        except ValueError as error:
            raise cannot_read(flat.structure.leaves[indexes[0]][0], error) from None
        stacked = torch.stack(leaves).detach().reshape(-1).to(_wide(device))
        return stacked * call_weight, [call_weight] * len(leaves)
    sums, weights = [], []
    for index, op, leaf in zip(indexes, ops, leaves, strict=True):
        try:
            summed, weight = _leaf_on_device(op, leaf, device, call_weight)
        except CannotRead:
            raise
        except Exception as error:
            raise cannot_read(flat.structure.leaves[index][0], error) from None
        sums.append(summed)
        weights.append(weight)
    return torch.stack(sums), torch.stack(weights)


def _leaf_on_device(op: Op, leaf: Any, device: torch.device, call_weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and the weight of one leaf, each a 0-d tensor."""
    values = op.prepare(_vector(leaf.value if isinstance(leaf, Marker) else leaf, device))
    if not op.is_weighted:
        return _combine(op, values), torch.ones((), dtype=values.dtype, device=device)
    own_weight = leaf.weight if isinstance(leaf, Mean) else None
    weights = _vector(call_weight if own_weight is None else own_weight, device)
    if values.numel() != 1:
        check_lengths(values.numel(), weights.numel())
    total = _total_weight(weights)
    factor = total if values.numel() == 1 else weights
    return (values * factor).where(factor > 0, 0.0).sum(), total


def _combine(op: Op, values: torch.Tensor) -> torch.Tensor:
    """Fold the elements of one leaf; 0.5 for an element that is no flag."""
    if op.is_flag:
        flags = values != 0
        flag = (flags.any() if op.elements == "max" else flags.all()).to(values.dtype)
        return flag.where((~flags | (values == 1)).all(), 0.5)
    if op.elements == "sum":
        return values.sum()
    if not values.numel():
        raise ValueError(f"empty, and has no {op.name}")
    return values.amin() if op.elements == "min" else values.amax()


def _vector(value: Any, device: torch.device) -> torch.Tensor:
    """Return the elements of a leaf or a weight [elements] on the device."""
    if isinstance(value, torch.Tensor):
        refuse_tensor(value)
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        return dense.to(device, non_blocking=True).reshape(-1).to(_wide(device), copy=True)
    elements = elements_of(value) if not isinstance(value, list) else value
    return _to_device(elements if isinstance(elements, list) else [elements], _wide(device), device)
