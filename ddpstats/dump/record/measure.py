"""The numbers of a tensor: largest, smallest, mean, 2-norm; how many NaN and infinities, and where the first is.

On the host, where a pass over the memory is the cost:

1. One pass each for the range, the sum and the dot product with itself, in float32 or the tensor's own wider type. The
   range is finite if and only if every element is, so tensors without NaN and infinities are through with that.
2. A sum or a square that leaves the range of its type, upwards or to nothing, is taken once more in float64.
3. Only where an element is not finite are such elements counted and located.
4. The order of the elements does not matter to 1, so that a transposed tensor is read as it lies in memory. Of an
   expanded one only what is there is looked at, also where its type has to be converted first.

On a device, where waiting is the cost, all of it is always computed, and one small float64 tensor is handed back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpstats._observe.gradient_norms import held_values
from ddpstats._observe.torch_compat import is_functorch_tensor
from ddpstats.dump.writer import is_dense, without_repeats


class Stats(NamedTuple):
    """``None`` where a tensor of this kind has no such number; ``first_bad`` is an index."""

    max: float | bool | None
    min: float | bool | None
    mean: float | None
    norm: float | None
    nan_count: int | None
    inf_count: int | None
    first_bad: list[int] | None


NOTHING = Stats(None, None, None, None, None, None, None)

_PLAIN = (Tensor, torch.nn.Parameter)  # others need not have a list of their numbers
_EXACT = (torch.float32, torch.float64)
_FEW = 32
_PART = 1 << 16  # a dot product adds up in float32, and the longer it is the more of that is lost
_SMALLEST_SQUARE = 1e-30  # a float32 below has few bits left: the squares may have been lost


def host_stats(tensor: Tensor) -> Stats:
    """Of a plain tensor in host memory, without recording a graph; the caller sees to that."""
    if tensor.numel() == 0:
        return NOTHING
    dtype = tensor.dtype
    if tensor.dim() and not tensor.is_contiguous():
        tensor, repeats = without_repeats(tensor)
    else:
        repeats = 1
    if dtype is torch.bool:
        return Stats(bool(tensor.any()), bool(tensor.all()), None, None, 0, 0, None)
    values = _as_real(tensor)
    if tensor.dim() == 0:
        return _of_one(_exact_item(tensor, values), dtype.is_complex)
    if values.numel() <= _FEW and type(values) in _PLAIN:
        found = _of_few(values.flatten().tolist(), dtype.is_complex, repeats)
        if found is not None:
            return found
    flat = _flat(values)
    low, high = (number.item() for number in torch.aminmax(flat))
    if dtype is torch.complex64 and not math.isfinite(high):  # its real and imaginary parts may be finite all the same
        flat = _flat(values := tensor.to(torch.complex128).abs())
        low, high = (number.item() for number in torch.aminmax(flat))
    if not (math.isfinite(low) and math.isfinite(high)):
        return _of_bad(values, low, high, dtype.is_complex, repeats)
    mean = _mean(flat)
    norm = None if dtype.is_complex else _norm(flat, max(-low, high)) * math.sqrt(repeats)
    return Stats(high, low, mean, norm, 0, 0, None)


def _as_real(tensor: Tensor) -> Tensor:
    dtype = tensor.dtype
    if dtype in _EXACT:
        return tensor.resolve_neg() if tensor.is_neg() else tensor
    if dtype.is_complex:
        return tensor.abs() if dtype is not torch.complex32 else tensor.to(torch.complex64).abs()
    return tensor.float() if dtype.is_floating_point else tensor.double()


def _exact_item(tensor: Tensor, value: Tensor) -> float:
    """Of one element; ``value`` is it, or its magnitude, which may be too large for its type."""
    number = float(value.item())
    if number == math.inf and tensor.dtype is torch.complex64:
        number = float(tensor.to(torch.complex128).abs().item())
    return number


def _of_one(value: float, is_complex: bool) -> Stats:
    nan, inf = math.isnan(value), math.isinf(value)
    return Stats(value, value, value, None if is_complex else value, int(nan), int(inf), [] if nan or inf else None)


def _of_few(numbers: list[float], is_complex: bool, repeats: int) -> Stats | None:
    """Python is through with so few before torch has begun. None where it is not: something is not finite."""
    try:
        mean = math.fsum(numbers) / len(numbers)
    except (OverflowError, ValueError):  # of what is finite, or infinities of both signs
        return None
    if not math.isfinite(mean):
        return None
    norm = None if is_complex else math.hypot(*numbers) * math.sqrt(repeats)
    return Stats(max(numbers), min(numbers), mean, norm, 0, 0, None)


def _of_bad(values: Tensor, low: float, high: float, is_complex: bool, repeats: int) -> Stats:
    """A range is NaN if an element is; if it is not, only the end that is infinite needs to be counted."""
    has_nan = math.isnan(low)
    nan = [values.ne(values)] if has_nan else []
    infinite = [values.eq(end) for end, seen in ((math.inf, high), (-math.inf, low)) if has_nan or seen == end]
    nan_count, inf_count = (sum(int(mask.count_nonzero().item()) for mask in masks) for masks in (nan, infinite))
    first = min(place for place in map(_first, nan + infinite) if place is not None)
    ends = {end for end in (low, high) if math.isinf(end)}
    mean = math.nan if has_nan or len(ends) == 2 else ends.pop()
    norm = None if is_complex else math.nan if has_nan else math.inf
    return Stats(high, low, mean, norm, nan_count * repeats, inf_count * repeats, _index(first, values.shape))


def _first(mask: Tensor) -> int | None:
    """The place of the first that is true, in the order of the elements; usually it is soon found."""
    flat = mask.flatten()
    start, size = 0, 1 << 10
    while start < flat.numel():
        part = flat[start : start + size]
        if part.any():
            return start + int(part.view(torch.uint8).argmax().item())
        start, size = start + size, 8 * size
    return None


def _flat(values: Tensor) -> Tensor:
    """All elements in one dimension, in any order."""
    if values.is_contiguous():
        return values.view(-1)
    if is_dense(values.shape, values.stride()):
        return values.as_strided((values.numel(),), (1,))
    return values.reshape(-1)


def _mean(flat: Tensor) -> float:
    total = flat.sum().item()
    if not math.isfinite(total):
        total = flat.sum(dtype=torch.float64).item()
        if not math.isfinite(total):
            return float((flat.double() / flat.numel()).sum().item())
    return float(total / flat.numel())


def _norm(flat: Tensor, largest: float) -> float:
    whole = flat.numel() // _PART * _PART
    parts = [*flat[:whole].view(-1, _PART).unbind(), flat[whole:]] if whole else [flat]
    square = math.fsum(torch.dot(part, part).item() for part in parts)
    if _SMALLEST_SQUARE <= square < math.inf or largest == 0:
        return math.sqrt(square)
    wide = flat.double()
    return float(largest * torch.linalg.vector_norm(wide / largest).item())


def _index(place: int, shape: Sequence[int]) -> list[int]:
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return index[::-1]


# -- on a device ------------------------------------------------------------------------------------------------------


def device_stats(tensor: Tensor) -> Tensor:
    """Seven numbers of a tensor that has elements, on its device. Nothing waits, and no value decides what is run."""
    if tensor.dtype is torch.bool:
        wide = tensor.to(torch.uint8)
        zero = wide.new_zeros((), dtype=_wide(tensor))
        return torch.stack([wide.amax().to(zero.dtype), wide.amin().to(zero.dtype), zero, zero, zero, zero, zero])
    values = _as_real_on_device(tensor)
    wide_dtype = _wide(tensor)
    low, high = torch.aminmax(values)
    bad, nan = values.isfinite().logical_not_(), values.isnan()
    nans = nan.sum()
    numbers = [
        high, low, values.mean(dtype=wide_dtype), torch.linalg.vector_norm(values, dtype=wide_dtype),
        nans, bad.sum() - nans, bad.flatten().view(torch.uint8).argmax(),
    ]  # fmt: skip
    return torch.stack([number.to(wide_dtype) for number in numbers])


def _as_real_on_device(tensor: Tensor) -> Tensor:
    if tensor.dtype.is_complex:  # a magnitude may be too large for the type of its parts
        return tensor.abs() if tensor.device.type == "mps" else tensor.to(torch.complex128).abs()
    if tensor.dtype.is_floating_point:
        return tensor if tensor.dtype in _EXACT else tensor.float()
    return tensor.to(_wide(tensor))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def of_numbers(numbers: Sequence[float], dtype: torch.dtype, shape: Sequence[int], repeats: int = 1) -> Stats:
    """What `device_stats` made, read on the host, of a tensor of this type and shape; see `without_repeats`."""
    high, low, mean, norm, nans, infs, first = numbers
    if dtype is torch.bool:
        return Stats(bool(high), bool(low), None, None, 0, 0, None)
    where = _index(int(first), shape) if nans or infs else None
    if not shape:
        norm = high
    norm *= math.sqrt(repeats)
    counts = int(nans) * repeats, int(infs) * repeats
    return Stats(high, low, mean, None if dtype.is_complex else norm, *counts, where)


def plain_values(tensor: Tensor) -> Tensor | None:
    """The numbers that this rank holds of it, as a plain strided tensor; None where there are none to read."""
    kind: Any = type(tensor)
    if is_functorch_tensor(tensor):  # inside torch.func: it has no value of its own
        return None
    if kind is not Tensor and kind is not torch.nn.Parameter and _is_fake(tensor):
        return None
    if tensor.layout is not torch.strided or hasattr(tensor, "placements") or tensor.is_nested:
        tensor = held_values(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    return tensor


def _is_fake(tensor: Tensor) -> bool:
    return any(base.__name__ in ("FakeTensor", "FunctionalTensor") for base in type(tensor).__mro__)
