"""The leaves of one add, read one by one: numbers in host memory now, tensors on a device only sorted.

Nothing is changed, and no device is waited for. Raises `CannotFlatten` with the path of a leaf that is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from ddpstats._base.exact_sums import Scaled
from ddpstats._reduction.device_totals import Alike, Numbers
from ddpstats._reduction.markers import Marker, Mean
from ddpstats._reduction.tree import CannotFlatten, Flat, is_absent, is_masked_array, unreadable
from ddpstats._reduction.values import Read, elements_of, path_of, read_leaf, read_weight, refuse_tensor, weigh

# A product with a float32, and a sum of many, neither overflows nor vanishes in a float64.
_LIGHTEST, _HEAVIEST = 1e-150, 1e150
_facts = attrgetter("dtype", "device", "shape", "layout")


@dataclass
class LeavesRead:
    """``host``: (slot, op, sum, weight, exact sum); ``weight``: of the call, where it is in host memory."""

    host: list[tuple[int, str, float, float, Scaled | None]] = field(default_factory=list)
    on_device: dict[torch.device, list[Alike]] = field(default_factory=dict)
    weight: float = 0.0

    def add(self, slot: int, op: str, read: Read) -> None:
        """A leaf in host memory."""
        summed, weight, _, exact = read
        self.host.append((slot, op, summed, weight, exact))


@dataclass(frozen=True)
class _CallWeight:
    total: float
    elements: list[float] | None
    numbers: Numbers
    device: torch.device | None


def read_leaves(flat: Flat, slots: Sequence[int], weight: Any, weight_slot: int) -> LeavesRead:
    """The leaves of ``flat``, for ``slots``; a weight that is on a device is a leaf, too, for ``weight_slot``."""
    call = _read_call_weight(weight)
    found = LeavesRead(weight=call.total)
    if call.device is not None:
        found.on_device[call.device] = [Alike("weight", [weight_slot], [[0.0]], [call.numbers])]
    if _are_alike(flat, call):
        one = Alike("mean", slots, flat.leaves, [call.numbers])
        found.on_device.setdefault(flat.leaves[0].device, []).append(one)
        return found
    groups: dict[Any, tuple[list[int], list[Numbers], list[Numbers]]] = {}
    for i, (slot, leaf) in enumerate(zip(slots, flat.leaves, strict=True)):
        try:
            _read(slot, leaf, call, found, groups)
        except CannotFlatten:
            raise
        except Exception as error:
            raise unreadable(path_of(flat.structure, i), error) from None
    for (device, op, *_), (places, values, weights) in groups.items():
        found.on_device.setdefault(device, []).append(Alike(op, places, values, weights or [call.numbers]))
    return found


def _are_alike(flat: Flat, call: _CallWeight) -> bool:
    """Whether all leaves are scalars on one device that differ in nothing but their values: seen at C speed."""
    if flat.structure.reading != "tensors" or _device_of(flat.leaves[0]) is None or flat.leaves[0].numel() != 1:
        return False
    refuse_tensor(flat.leaves[0])
    return len({*map(_facts, flat.leaves)}) == 1 and _is_usual(call.numbers)


def _read_call_weight(weight: Any) -> _CallWeight:
    device = _device_of(weight)
    if device is None:
        total, elements = read_weight(weight)
        return _CallWeight(total, elements, [total] if elements is None else elements, None)
    try:
        refuse_tensor(weight)
    except ValueError as error:
        raise CannotFlatten((), f"the weight is {str(error).partition(';')[0]}; it is a real number or 1-d") from None
    return _CallWeight(0.0, None, weight, device)


def _read(slot: int, leaf: Any, call: _CallWeight, found: LeavesRead, groups: dict[Any, Any]) -> None:
    if call.device is None and _is_plain(leaf):
        found.add(slot, "mean", weigh(float(leaf), call.total, None))
        return
    op = leaf.op if isinstance(leaf, Marker) else "mean"
    inner = leaf.value if isinstance(leaf, Marker) else leaf
    own = leaf.weight if isinstance(leaf, Mean) else None
    if is_absent(inner):
        return
    device = _device_of(inner)
    if op == "mean":
        device = device or (_device_of(own) if own is not None else call.device)
    if device is None:
        found.add(slot, op, read_leaf(leaf, call.total, call.elements))
        return
    value = _numbers(inner, device)
    weight, weight_key = None, None
    if op == "mean":
        weight = call.numbers if own is None else _own_weight(own)
        _check_weight(weight)
        _check_length(_count(value), _count(weight))
        weight_key = None if own is None else _key(weight)
    elif not _count(value) and op in ("min", "max"):
        raise ValueError(f"empty, and has no {op}")
    places, values, weights = groups.setdefault((device, op, _key(value), weight_key), ([], [], []))
    places.append(slot)
    values.append(value)
    if own is not None and weight is not None:
        weights.append(weight)


def _is_plain(leaf: Any) -> bool:
    """Whether it is a float, or a tensor of one in host memory: as most leaves are, which need no further look."""
    if type(leaf) is not torch.Tensor:
        return type(leaf) is float
    return leaf.dtype.is_floating_point and _device_of(leaf) is None and leaf.numel() == 1


def _numbers(value: Any, device: torch.device) -> Numbers:
    if isinstance(value, torch.Tensor) and _device_of(value) is not None:
        refuse_tensor(value)
        return value
    if is_masked_array(value):
        raise ValueError(f"masked, and its weight is on {device}; pass the weight in host memory")
    found = elements_of(value)
    return found if isinstance(found, list) else [found]


def _own_weight(weight: Any) -> Numbers:
    try:
        if _device_of(weight) is not None:
            refuse_tensor(weight)
            return weight  # type: ignore[no-any-return]
        total, elements = read_weight(weight)
    except (CannotFlatten, ValueError) as error:
        raise ValueError(f"a Mean for which {error}") from None
    return [total] if elements is None else elements


def _check_weight(numbers: Numbers) -> None:
    """Raises for a weight in host memory that a device's sums could not do justice to."""
    if not _is_usual(numbers):
        raise ValueError(
            f"on a device, where a weight is 0, or between {_LIGHTEST} and {_HEAVIEST}. Only the ratios of weights "
            "count in a mean: divide all weights, on every rank, by one number"
        )


def _is_usual(weight: Numbers) -> bool:
    return isinstance(weight, torch.Tensor) or all(one == 0 or _LIGHTEST <= one <= _HEAVIEST for one in weight)


def _check_length(values: int, weights: int) -> None:
    if values not in (1, weights):
        raise ValueError(
            f"a 1-d tensor of {values} elements, while the weight has {weights}: their lengths must be equal"
        )


def _count(numbers: Numbers) -> int:
    return numbers.numel() if isinstance(numbers, torch.Tensor) else len(numbers)


def _key(numbers: Numbers) -> Any:
    return _facts(numbers) if isinstance(numbers, torch.Tensor) else len(numbers)


def _device_of(value: Any) -> torch.device | None:
    """Of a tensor that is on none but the host: None."""
    return value.device if isinstance(value, torch.Tensor) and not value.is_cpu else None
