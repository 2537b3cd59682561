"""Arithmetic on vectors of float64 held in `array`: plain Python for few elements, torch for many."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from ddpstats._base.exact_sums import SMALLEST

# Below this many elements a list comprehension beats the fixed cost of torch calls (measured on torch 2.13, CPU).
_LARGE = 256
_CHUNK = 4096


def product(values: Iterable[float], weight: float, count: int) -> array[float]:
    """``values`` times ``weight``. Raises TypeError or OverflowError for what is not a float64."""
    if count < _LARGE:
        return array("d", [value * weight for value in values])
    result = _to_array(values)
    _tensor(result).mul_(weight)
    return result


def _to_array(values: Iterable[float]) -> array[float]:
    """``values`` as float64. From a list of known length an array is filled a sixth faster than from an iterator."""
    result, rest = array("d"), iter(values)
    while chunk := list(islice(rest, _CHUNK)):
        result.fromlist(chunk)
    return result


def is_finite(values: array[float]) -> bool:
    """No NaN and no infinity. A finite sum proves it; only where the sum is not, the elements are looked at."""
    total = sum(values) if len(values) < _LARGE else _tensor(values).sum().item()
    return math.isfinite(total) or all(map(math.isfinite, values))


def are_normal(values: array[float]) -> bool:
    """No zero, and nothing that is smaller than what a float64 holds with all of its bits."""
    if not values:
        return True
    return (min(map(abs, values)) if len(values) < _LARGE else _tensor(values).abs().min().item()) >= SMALLEST


def quotient(sums: array[float], weights: float | array[float]) -> tuple[list[float], bool]:
    """``sums`` divided by ``weights``; NaN where the weight is 0. And whether all are finite."""
    if len(sums) >= _LARGE:
        divisor = weights if isinstance(weights, float) else _tensor(weights)
        # 0 / 0 is NaN on its own; an entry of weight 0 adds nothing, so its sum is 0.
        divided = _tensor(sums) / divisor
        return divided.tolist(), math.isfinite(divided.sum().item())
    if not isinstance(weights, float):
        found = [value / weight if weight else math.nan for value, weight in zip(sums, weights, strict=True)]
    else:
        found = [value / weights for value in sums] if weights else [math.nan] * len(sums)
    return found, math.isfinite(sum(found))


def add(totals: array[float], values: array[float]) -> None:
    """Element by element, in place."""
    if totals:
        _tensor(totals).add_(_tensor(values))


def spread(size: int, slots: Sequence[int], values: array[float]) -> array[float]:
    """A vector of ``size`` zeros with ``values[i]`` at ``slots[i]``."""
    result = array("d", bytes(8 * size))
    if len(values) < _LARGE or not isinstance(slots, array):
        for slot, value in zip(slots, values, strict=True):
            result[slot] = value
    else:
        _tensor(result)[torch.frombuffer(slots, dtype=torch.int64)] = _tensor(values)
    return result


def pick(values: memoryview[float], slots: Sequence[int]) -> array[float]:
    """``values`` at ``slots``, copied."""
    if len(slots) == len(values):
        return array("d", values.tobytes())
    return array("d", [values[slot] for slot in slots])


def _tensor(values: array[float]) -> torch.Tensor:
    """A view, not a copy."""
    return torch.frombuffer(values, dtype=torch.float64)
