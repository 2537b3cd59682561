"""The values of the leaves, on the host, masked, weighted, in float64: one rank's part of a reduction.

1. `prepare` takes the stats apart and starts one copy to the host for everything that lives on an accelerator.
   It never raises: what is wrong with this rank's stats becomes the part's `failure`, so that the rank still takes
   part in the collective and says so.
2. `Prepared.part` waits for that copy and computes, per leaf, what goes into the sum. Masked before multiplied: an
   entry of weight 0 contributes nothing, whatever its value, because 0 times infinity is NaN.
"""

from __future__ import annotations

import math
import numbers
from array import array
from collections.abc import Mapping
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

import torch

from ddpstats._base import exact_sums
from ddpstats._base.exact_sums import LARGEST, SMALLEST, Scaled, scaled_sum
from ddpstats._base.lazy import is_fake
from ddpstats._base.paths import Path, format_path
from ddpstats._ranks.status import Failure
from ddpstats._ranks.vectors import are_normal, are_summable, elements, is_finite, product
from ddpstats._reduction.host_copy import HostCopy
from ddpstats._reduction.markers import Marker, Mean
from ddpstats._reduction.schema import iter_leaves
from ddpstats._reduction.tree import (
    CannotFlatten,
    Flat,
    Structure,
    flatten,
    is_absent,
    is_masked_array,
    is_numpy,
    mask_of,
    unreadable,
)
from ddpstats._reduction.wire import Numbers

_is_cpu = attrgetter("is_cpu")
_NOTHING: Mapping[int, Scaled] = MappingProxyType({})


class Part(NamedTuple):
    """One rank's numbers, one entry per leaf of the structure's schema.

    ``sums``: value times weight for means, the value itself for every other op. ``weights``: one for all leaves, or one
    each. ``weight``: what the rank adds to the total weight of the call. ``finite``: no NaN or infinity among the sums.
    ``scaled``: leaf -> its sum, where a float64 cannot hold it: values are finite, and a product is too large or small.
    ``values``: what this rank alone would have as the result; None where nobody asked. NaN stands for no value, too.
    ``mixed``: leaves with a finite sum that had a NaN or an infinity too, in another add of a window.
    """

    structure: Structure
    sums: array[float]
    weights: float | array[float]
    weight: float
    finite: bool
    scaled: Mapping[int, Scaled] = _NOTHING
    values: array[float] | None = None
    mixed: tuple[int, ...] = ()

    def numbers(self, divide: bool) -> Numbers:
        return Numbers(self.weight, self.sums, self.weights, self.scaled if divide else _NOTHING, self.mixed)


class Given(Protocol):
    """What one rank brings to a reduction."""

    def part(self) -> Part | Failure:
        """Its numbers, or why there are none; never raises, so that the rank takes part in any case."""


class Prepared:
    """Stats taken apart, or the failure to do so."""

    def __init__(self, stats: Any, weight: Any, keep_dtypes: bool = False, per_rank: bool = False) -> None:
        self._flat: Flat | None = None
        self._weight, self._per_rank = weight, per_rank
        self._copy: HostCopy | None = None
        self._part: Part | Failure
        try:
            self._flat = flatten(stats, keep_dtypes)
            self._copy = _start_copy(self._flat, weight)
            if self._copy is None:
                self._part = part_of(self._flat, weight, per_rank)
            else:  # what is on the host is read later, with the rest, and may change until then
                self._flat = Flat(self._flat.structure, list(map(_taken, self._flat.leaves)))
                self._weight = _taken(weight)
        except CannotFlatten as error:
            self._part = error.failure
        except Exception as error:  # whatever a foreign leaf type raises: this rank must still take part
            self._part = Failure("", f"the stats cannot be read: {type(error).__name__}: {error}")

    def part(self) -> Part | Failure:
        """Wait for the copy to the host, if there is one; never raises."""
        if self._copy is not None and self._flat is not None:
            try:
                leaves, weight = self._copy.wait(self._flat.leaves, self._weight)
                self._part = part_of(Flat(self._flat.structure, leaves), weight, self._per_rank)
            except CannotFlatten as error:
                self._part = error.failure
            except Exception as error:
                self._part = Failure("", f"the stats cannot be copied to the host: {type(error).__name__}: {error}")
            self._copy = None
        return self._part


def _start_copy(flat: Flat, weight: Any) -> HostCopy | None:
    on_host = type(weight) in (float, int) or not isinstance(weight, torch.Tensor) or weight.is_cpu
    if on_host and not accelerator_in_use():
        return None
    if on_host:
        reading = flat.structure.reading
        if reading == "numbers" or (reading == "tensors" and all(map(_is_cpu, flat.leaves))):
            return None
        if reading == "plain" and all(leaf.is_cpu for leaf in flat.leaves if type(leaf) is torch.Tensor):
            return None
    return HostCopy.start_if_needed(flat.leaves, weight)


def _taken(value: Any) -> Any:
    """A leaf as it is now; what lives on an accelerator is in the copy already."""
    if isinstance(value, Mean):
        return Mean(_taken(value.value), _taken(value.weight))
    if isinstance(value, Marker):
        return type(value)(_taken(value.value))
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.is_cpu and not hasattr(value, "placements") else value
    return value.copy() if is_numpy(value) else value


def accelerator_in_use() -> bool:
    """False only where no tensor can be anywhere but in host memory: then none of them need be asked."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        return False
    return accelerator is not None and (accelerator.type != "cuda" or torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def part_of(flat: Flat, weight: Any, per_rank: bool) -> Part:
    total, elements = read_weight(weight)
    sums = None if elements is not None and len(elements) != 1 else _read_simple(flat, total)
    if sums is None:
        return _read_each(flat, total, elements)
    values = _read_simple(flat, 1.0) if per_rank else None
    # With a weight of 1 or more a product loses nothing that the mean would show.
    if are_summable(sums) and (total >= 1 or are_normal(sums)):
        return Part(flat.structure, sums, total, total, True, _NOTHING, values)
    odd = [(i, elements_of(flat.leaves[i])) for i, s in enumerate(sums) if _is_odd(s)]
    found = [(i, _scaled([cast(float, value)], [total], sums[i])) for i, value in odd if value]
    scaled = {i: own for i, own in found if own is not None}
    return Part(flat.structure, sums, total, total, is_finite(sums), scaled, values)


def read_weight(weight: Any) -> tuple[float, list[float] | None]:
    """The total weight, and the elements of a 1-d weight. Raises `CannotFlatten` for what cannot be a weight."""
    try:
        value = elements_of(weight) if type(weight) is not float else weight
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).partition(";")[0]  # what follows explains leaves
        raise CannotFlatten((), f"the weight is {reason}; it is a real number or a 1-d tensor") from None
    elements = value if isinstance(value, list) else None
    try:
        total = math.fsum(value) if isinstance(value, list) else value
        fits = 0 <= total < math.inf and not (elements and min(elements) < 0)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum that is none
        fits = False
    if not fits:
        raise CannotFlatten((), f"the weight is {_shorten(weight)}; {_why_no_weight(elements or [])}")
    return total, elements


def _why_no_weight(elements: list[float]) -> str:
    if elements and all(0 <= element < math.inf for element in elements):
        return (
            "its elements add up to more than a float64 can hold. Only the ratios of weights count in a mean: divide "
            "all weights, on every rank, by one number"
        )
    return "a weight is finite and not negative"


def _read_simple(flat: Flat, weight: float) -> array[float] | None:
    """The sums where every leaf is a plain scalar, at C speed; None where leaves must be looked at one by one."""
    leaves, reading = flat.leaves, flat.structure.reading
    if reading == "general" or weight == 0:
        return None
    try:
        if reading == "numbers":
            return product(leaves, weight, len(leaves))
        if flat.structure.one_dtype:
            return product(elements(leaves), weight, len(leaves))
        if reading == "tensors":
            return product(map(torch.Tensor.item, leaves), weight, len(leaves))
        return product([x.item() if type(x) is torch.Tensor else x for x in leaves], weight, len(leaves))
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None


# -- one by one -------------------------------------------------------------------------------------------------------


def _read_each(flat: Flat, total: float, elements: list[float] | None) -> Part:
    sums, weights, values, scaled = array("d"), array("d"), array("d"), dict[int, Scaled]()
    for i, leaf in enumerate(flat.leaves):
        try:
            summed, weight, value, own = read_leaf(leaf, total, elements)
        except Exception as error:
            raise unreadable(path_of(flat.structure, i), error) from None
        if own is not None:
            scaled[i] = own
        sums.append(summed)
        weights.append(weight)
        values.append(value)
    return Part(flat.structure, sums, weights, total, is_finite(sums), scaled, values)


Read = tuple[float, float, float, Scaled | None]
"""The sum, the weight, this rank's own result, and the sum again where a float64 cannot hold it."""


def read_leaf(value: Any, total: float, elements: list[float] | None) -> Read:
    marker = value if isinstance(value, Marker) else None
    inner = marker.value if marker is not None else value
    if is_absent(inner):
        return 0.0, 0.0, math.nan, None
    if marker is not None and marker.op != "mean":
        return _combine(marker.op, elements_of(inner.compressed() if is_masked_array(inner) else inner))
    if isinstance(marker, Mean) and marker.weight is not None:
        try:
            total, elements = read_weight(marker.weight)
        except CannotFlatten as error:
            raise ValueError(f"a Mean for which {error}") from None
    values = elements_of(inner)
    if isinstance(values, list) and is_masked_array(inner) and elements is not None and len(elements) == len(values):
        elements = [0.0 if masked else weight for masked, weight in zip(mask_of(inner), elements, strict=True)]
        total = math.fsum(elements)
    return weigh(values, total, elements)


def weigh(value: float | list[float], total: float, elements: list[float] | None) -> Read:
    """The sum is of value times weight: element by element for a 1-d leaf under a 1-d weight."""
    if not isinstance(value, list):
        summed = value * total if total > 0 else 0.0
        return summed, total, value, _scaled([value], [total], summed) if _is_odd(summed) else None
    if elements is None or len(elements) != len(value):
        given = "the weight is a single number" if elements is None else f"the weight has {len(elements)}"
        raise ValueError(f"a 1-d tensor of {len(value)} elements, while {given}: their lengths must be equal")
    products = [v * w for v, w in zip(value, elements, strict=True) if w > 0]
    summed = sum(products) + 0.0
    odd = _is_odd(summed) or any(map(_is_odd, products))
    scaled = _scaled(value, elements, summed) if odd else None
    if scaled is not None:
        return summed, total, exact_sums.mean([exact_sums.as_fraction(scaled)], [total]), scaled
    return summed, total, summed / total if total else math.nan, None


def _is_odd(summed: float) -> bool:
    """Zero, not finite, too large for a sum over ranks, or too small to have all of its bits."""
    return not SMALLEST <= abs(summed) < LARGEST


def _scaled(values: list[float], weights: list[float], summed: float) -> Scaled | None:
    """The sum of products, where ``summed`` or a product in it is too large or too small for a float64."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if value and weight]
    if abs(summed) < LARGEST:
        if not any(weight < 1 and abs(value * weight) < SMALLEST for value, weight in pairs):
            return None  # with a weight of 1 or more a product loses nothing that the mean would show
    elif not all(math.isfinite(value) for value, _ in pairs):
        return None
    return scaled_sum(pairs)


def _combine(op: str, value: float | list[float]) -> Read:
    """One rank's own value under an op other than mean; a 1-d value is combined over its elements first."""
    values = value if isinstance(value, list) else [value]
    if op in ("any", "all"):
        if any(flag not in (0.0, 1.0) for flag in values):
            raise ValueError(f"{_shorten(value)}, which is not a flag; a flag is a bool, 0 or 1")
        flag = float(any(values) if op == "any" else all(values))
        return flag, 1.0, flag, None
    if op == "sum":
        summed, weight, _, scaled = weigh(values, 1.0, [1.0] * len(values))
        if not isinstance(value, list):
            return summed, weight, value, scaled
        return summed, weight, summed if scaled is None else exact_sums.total([exact_sums.as_fraction(scaled)]), scaled
    if not values:
        raise ValueError(f"empty, and has no {op}")
    if any(map(math.isnan, values)):
        return math.nan, 1.0, math.nan, None
    extreme = {"min": min, "max": max}[op](values)
    return extreme, 1.0, extreme, None


def elements_of(value: Any) -> float | list[float]:
    """A scalar as float, a 1-d tensor or array of another length than 1 as a list of floats; 0 where it is masked."""
    if isinstance(value, torch.Tensor):
        return _tensor_elements(value)
    if isinstance(value, float):  # numpy's float64 too
        return float(value)
    size, dims = getattr(value, "size", None), getattr(value, "ndim", None)
    if not isinstance(size, int) or not isinstance(dims, int):
        return _number(value)
    _refuse_kind(value)  # numpy, or what is like it
    if size != 1 and dims != 1:
        raise ValueError(f"an array of shape {value.shape}; a leaf is a scalar or 1-d")
    if is_masked_array(value):
        if dims == 0 and value.mask:
            raise ValueError("masked; masked values are absent")
        value = value.filled(0)
    if size == 1:
        return _number(value.item() if hasattr(value, "item") else value)
    items = value.tolist()
    return list(map(float if {*map(type, items)} <= {float, int, bool} else _number, items))


# What numpy turns into a float although it is none, by ``dtype.kind``: a duration becomes a count of its own unit.
_NO_NUMBERS = {
    "c": "complex; log its real part, imaginary part or absolute value",
    "m": "a duration ({}); log a number of a unit of your choice, such as value / np.timedelta64(1, 's')",
    "M": "a point in time ({}); log a number, such as (value - start) / np.timedelta64(1, 's')",
    "S": "of type bytes, which is not a number",
    "U": "of type str, which is not a number",
    "T": "of type str, which is not a number",
    "V": "a record or raw bytes ({}); log each number under a key of its own",
}


def _refuse_kind(value: Any) -> None:
    dtype = getattr(value, "dtype", None)
    why = _NO_NUMBERS.get(getattr(dtype, "kind", ""))
    if why is not None:
        raise ValueError(why.format(dtype))


def _number(value: Any) -> float:
    """One number; not a tensor, nor an array."""
    _refuse_kind(value)  # an array of objects may hold anything
    if isinstance(value, complex):
        raise ValueError(_NO_NUMBERS["c"])
    if not hasattr(value, "__float__"):
        raise TypeError(f"of type {type(value).__qualname__}, which is not a number")
    found = float(value)
    exact: Any = value if isinstance(value, numbers.Number) else found
    if math.isinf(found) and exact != found:
        raise OverflowError(f"{_shorten(value)}, which is too large for a float64")
    return found


def _tensor_elements(tensor: torch.Tensor) -> float | list[float]:
    if tensor.is_meta and not is_fake(tensor):
        raise ValueError(ON_META)
    refuse_tensor(tensor)
    if tensor.numel() == 1:
        return float(tensor.item())
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return [float(item) for item in tensor.to_dense().tolist()]


ON_META = "on the device meta, and meta tensors have a shape but no value; pass a tensor with values"


def refuse_tensor(tensor: torch.Tensor) -> None:
    """Raises ValueError for what is no leaf, as far as that can be said without its value."""
    if is_fake(tensor):
        raise ValueError("a FakeTensor, which has a shape but no value; pass a tensor made outside of FakeTensorMode")
    if tensor.is_complex():
        raise ValueError("a complex tensor; log its real part, imaginary part or absolute value")
    if hasattr(tensor, "placements"):
        raise ValueError("a DTensor; pass .full_tensor() (a collective) or .to_local() of it")
    if tensor.is_nested:
        raise ValueError("a nested tensor; log each of its parts under a key of its own")
    if tensor.numel() != 1 and tensor.dim() != 1:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)}; a leaf is a scalar, or 1-d like a 1-d weight")


def too_small_or_large(part: Part) -> Failure:
    """The failure of a rank that cannot tell the others its `Part.scaled`."""
    path = format_path(path_of(part.structure, min(part.scaled)))
    why = "value times weight is too large or too small to be added up with so many paths"
    return Failure(path, f"{why}; scale the value, or use weights closer to 1")


def path_of(structure: Structure, index: int) -> Path:
    return next(islice(iter_leaves(structure.schema), index, None))[0]


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
