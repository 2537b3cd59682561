"""The numbers of a tensor: largest, smallest, mean, 2-norm; how many NaN and infinities, and where the first is.

On the host, where a pass over the memory is the cost:

1. One pass each for the range, the sum and the dot product with itself, in float32 or the tensor's own wider type. The
   range is finite if and only if every element is, so tensors without NaN and infinities are through with that.
2. A sum or a square that leaves the range of its type, upwards or to nothing, is taken once more in float64.
3. Only where an element is not finite are such elements counted and located.
4. The order of the elements does not matter to 1, so that a transposed tensor is read as it lies in memory, and of an
   expanded one only what is there.

On a device, where waiting is the cost, all of it is always computed, and one small float64 tensor is handed back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpstats._gradients import held_values


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

_EXACT = (torch.float32, torch.float64)
_PART = 1 << 16  # a dot product adds up in float32, and the longer it is the more of that is lost
_SMALLEST_SQUARE = 1e-30  # a float32 below has few bits left: the squares may have been lost


def host_stats(tensor: Tensor) -> Stats:
    """Of a plain tensor in host memory, without recording a graph; the caller sees to that."""
    if tensor.numel() == 0:
        return NOTHING
    dtype = tensor.dtype
    if dtype is torch.bool:
        return Stats(bool(tensor.any()), bool(tensor.all()), None, None, 0, 0, None)
    values = _as_real(tensor)
    if tensor.dim() == 0:
        return _of_one(values.item(), dtype.is_complex)
    flat, repeats = _flat(values)
    low_, high_ = torch.aminmax(flat)
    low, high = low_.item(), high_.item()
    if not (math.isfinite(low) and math.isfinite(high)):
        return _of_bad(values, low, high, dtype.is_complex)
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


def _of_one(value: float, is_complex: bool) -> Stats:
    nan, inf = math.isnan(value), math.isinf(value)
    return Stats(value, value, value, None if is_complex else value, int(nan), int(inf), [] if nan or inf else None)


def _of_bad(values: Tensor, low: float, high: float, is_complex: bool) -> Stats:
    bad = values.isfinite().logical_not_()
    nan_count = int(values.isnan().sum().item())
    inf_count = int(bad.sum().item()) - nan_count
    first = int(bad.flatten().to(torch.uint8).argmax().item())
    norm = None if is_complex else math.nan if nan_count else math.inf
    return Stats(high, low, values.mean().item(), norm, nan_count, inf_count, unravel(first, values.shape))


def _flat(values: Tensor) -> tuple[Tensor, int]:
    """All elements in one dimension, in any order; those that are there several times once, and how many times."""
    if values.is_contiguous():
        return values.view(-1), 1
    shape, strides = values.shape, values.stride()
    repeats = math.prod(size for size, stride in zip(shape, strides, strict=True) if stride == 0)
    if repeats != 1:
        shape = torch.Size(1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True))
        values = values.as_strided(shape, strides)
    if _is_dense(shape, strides):
        return values.as_strided((math.prod(shape),), (1,)), repeats
    return values.reshape(-1), repeats


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _mean(flat: Tensor) -> float:
    total = flat.sum().item()
    if not math.isfinite(total):
        total = flat.sum(dtype=torch.float64).item()
        if not math.isfinite(total):
            return float((flat.double() / flat.numel()).sum().item())
    return float(total / flat.numel())


def _norm(flat: Tensor, largest: float) -> float:
    parts = [flat] if flat.numel() <= _PART else flat.split(_PART)  # type: ignore[no-untyped-call]
    square = math.fsum(torch.dot(part, part).item() for part in parts)
    if _SMALLEST_SQUARE <= square < math.inf or largest == 0:
        return math.sqrt(square)
    wide = flat.double()
    return float(largest * torch.linalg.vector_norm(wide / largest).item())


def unravel(place: int, shape: Sequence[int]) -> list[int]:
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
        nans, bad.sum() - nans, bad.flatten().to(torch.uint8).argmax(),
    ]  # fmt: skip
    return torch.stack([number.to(wide_dtype) for number in numbers])


def _as_real_on_device(tensor: Tensor) -> Tensor:
    if tensor.dtype.is_complex:
        return tensor.abs()
    return tensor if tensor.dtype in _EXACT else tensor.float()


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def of_numbers(numbers: Sequence[float], dtype: torch.dtype, shape: Sequence[int]) -> Stats:
    """What `device_stats` made, read on the host, of a tensor of this type and shape."""
    high, low, mean, norm, nans, infs, first = numbers
    if dtype is torch.bool:
        return Stats(bool(high), bool(low), None, None, 0, 0, None)
    where = unravel(int(first), shape) if nans or infs else None
    if not shape:
        norm = high
    return Stats(high, low, mean, None if dtype.is_complex else norm, int(nans), int(infs), where)


def plain_values(tensor: Tensor) -> Tensor | None:
    """The numbers that this rank holds of it, as a plain strided tensor; None where there are none to read."""
    kind: Any = type(tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside torch.func: it has no value of its own
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
