"""Arithmetic on vectors of float64 held in `array`: plain Python for few elements, torch for many."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from ddpstats._base.exact_sums import LARGEST, SMALLEST

# Below this many elements a list comprehension beats the fixed cost of torch calls (measured on torch 2.13, CPU).
_LARGE = 256
_CHUNK = 4096


def product(values: Iterable[float], weight: float, count: int) -> array[float]:
    """``values`` times ``weight``. Raises TypeError or OverflowError for what is not a float64."""
    if count < _LARGE:
        return array("d", [value * weight for value in values])
    result = array("d", values) if isinstance(values, array) else _to_array(values)
    _tensor(result).mul_(weight)
    return result


def elements(tensors: list[torch.Tensor]) -> Iterable[float]:
    """The one element of each, for `product`. The tensors are in host memory, and of one floating dtype.

    Raises RuntimeError for what has no element, or more.
    """
    if len(tensors) < _LARGE or tensors[0].numel() != 1:
        return map(torch.Tensor.item, tensors)
    found = array("d", bytes(8 * len(tensors)))
    _tensor(found).copy_(torch.stack(tensors).detach().view(-1))  # refuses tensors that differ in shape
    return found


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


def are_summable(values: array[float]) -> bool:
    """No NaN, no infinity, and nothing so large that a sum over ranks may overflow."""
    if len(values) >= _LARGE:
        return bool(_tensor(values).abs().max().item() < LARGEST)
    return math.hypot(*values) < LARGEST  # of all of them, and it does not overflow on its way


def are_normal(values: array[float]) -> bool:
    """No zero, and nothing that is smaller than what a float64 holds with all of its bits."""
    if not values:
        return True
    return (min(map(abs, values)) if len(values) < _LARGE else _tensor(values).abs().min().item()) >= SMALLEST


def quotient(sums: array[float], weights: float | array[float]) -> tuple[array[float], bool]:
    """``sums`` divided by ``weights``; NaN where the weight is 0. And whether all are finite."""
    if len(sums) >= _LARGE:
        divisor = weights if isinstance(weights, float) else _tensor(weights)
        # 0 / 0 is NaN on its own; an entry of weight 0 adds nothing, so its sum is 0.
        divided = array("d", bytes(8 * len(sums)))
        torch.div(_tensor(sums), divisor, out=_tensor(divided))
        return divided, is_finite(divided)
    if not isinstance(weights, float):
        found = [value / weight if weight else math.nan for value, weight in zip(sums, weights, strict=True)]
    else:
        found = [value / weights for value in sums] if weights else [math.nan] * len(sums)
    return array("d", found), math.isfinite(sum(found))


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


def as_tensor(values: array[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What `torch.tensor` makes of ``values``, to the bit; without a Python number for each, where they are many."""
    code = _CODES.get(dtype)
    if code is None or not values:  # torch gives a NaN of half precision other bits when it converts a vector
        return torch.tensor(values, dtype=dtype, device=device)
    found = (
        _tensor(values).to(dtype, copy=True)
        if len(values) >= _LARGE
        else torch.frombuffer(array(code, values), dtype=dtype)
    )
    return found if device.type == "cpu" else found.to(device)


_CODES = {torch.float32: "f", torch.float64: "d"}


def _tensor(values: array[float]) -> torch.Tensor:
    """A view, not a copy."""
    return torch.frombuffer(values, dtype=torch.float64)
