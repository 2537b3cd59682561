"""The values of the leaves, on the host, masked, weighted, in float64: one rank's part of a reduction.

1. `prepare` takes the stats apart and starts one copy to the host for everything that lives on an accelerator.
   It never raises: what is wrong with this rank's stats becomes the part's `failure`, so that the rank still takes
   part in the collective and says so.
2. `Prepared.part` waits for that copy and computes, per leaf, what goes into the sum. Masked before multiplied: an
   entry of weight 0 contributes nothing, whatever its value, because 0 times infinity is NaN.
"""

from __future__ import annotations

import math
from array import array
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ddpstats._host_copy import HostCopy
from ddpstats._markers import Marker, Mean
from ddpstats._paths import Path
from ddpstats._schema import iter_leaves
from ddpstats._tree import CannotFlatten, Flat, Structure, flatten
from ddpstats._vector import is_finite, product
from ddpstats._wire import Failure

_is_cpu = attrgetter("is_cpu")


class Part(NamedTuple):
    """One rank's numbers, one entry per leaf of the structure's schema.

    ``sums``: value times weight for means, the value itself for every other op. ``weights``: one for all leaves, or one
    each. ``weight``: what the rank adds to the total weight of the call. ``finite``: no NaN or infinity among the sums.
    """

    structure: Structure
    sums: array[float]
    weights: float | array[float]
    weight: float
    finite: bool


class Prepared:
    """Stats taken apart, or the failure to do so."""

    def __init__(self, stats: Any, weight: Any, keep_dtypes: bool = False) -> None:
        self._flat: Flat | None = None
        self._weight = weight
        self._copy: HostCopy | None = None
        self._part: Part | Failure
        try:
            self._flat = flatten(stats, keep_dtypes)
            self._copy = _start_copy(self._flat, weight)
            if self._copy is None:
                self._part = _part(self._flat, weight)
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
                self._part = _part(Flat(self._flat.structure, leaves), weight)
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
    return value.copy() if type(value).__module__ == "numpy" else value


def accelerator_in_use() -> bool:
    """False only where no tensor can be anywhere but in host memory: then none of them need be asked."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        return False
    return accelerator is not None and (accelerator.type != "cuda" or torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _part(flat: Flat, weight: Any) -> Part:
    total, elements = _read_weight(weight)
    sums = None if elements is not None and len(elements) != 1 else _read_simple(flat, total)
    weights: float | array[float] = total
    if sums is None:
        sums, weights = _read_each(flat, total, elements)
    return Part(flat.structure, sums, weights, total, is_finite(sums))


def _read_weight(weight: Any) -> tuple[float, list[float] | None]:
    """The total weight, and the elements of a 1-d weight. Raises `CannotFlatten` for what cannot be a weight."""
    try:
        value = _elements(weight) if type(weight) is not float else weight
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
        raise CannotFlatten((), f"the weight is {_shorten(weight)}; a weight is finite and not negative")
    return total, elements


def _read_simple(flat: Flat, weight: float) -> array[float] | None:
    """The sums where every leaf is a plain scalar, at C speed; None where leaves must be looked at one by one."""
    leaves, reading = flat.leaves, flat.structure.reading
    if reading == "general" or weight == 0:
        return None
    try:
        if reading == "numbers":
            return product(leaves, weight, len(leaves))
        if reading == "tensors":
            return product(map(torch.Tensor.item, leaves), weight, len(leaves))
        return product([x.item() if type(x) is torch.Tensor else x for x in leaves], weight, len(leaves))
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None


# -- one by one -------------------------------------------------------------------------------------------------------


def _read_each(flat: Flat, total: float, elements: list[float] | None) -> tuple[array[float], array[float]]:
    sums, weights = array("d"), array("d")
    for i, value in enumerate(flat.leaves):
        try:
            summed, weight = _read_leaf(value, total, elements)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise CannotFlatten(_path_of(flat, i), f"the value is {error}") from None
        except Exception as error:  # a foreign type's own
            what = f"the value cannot be read: {type(error).__name__}: {error}"
            raise CannotFlatten(_path_of(flat, i), what) from None
        sums.append(summed)
        weights.append(weight)
    return sums, weights


def _read_leaf(value: Any, total: float, elements: list[float] | None) -> tuple[float, float]:
    marker = value if isinstance(value, Marker) else None
    inner = marker.value if marker is not None else value
    if inner is None:
        return 0.0, 0.0
    if marker is not None and marker.op != "mean":
        return _combine(marker.op, _elements(inner)), 1.0
    if isinstance(marker, Mean) and marker.weight is not None:
        try:
            total, elements = _read_weight(marker.weight)
        except CannotFlatten as error:
            raise ValueError(f"a Mean for which {error}") from None
    return _weigh(_elements(inner), total, elements)


def _weigh(value: float | list[float], total: float, elements: list[float] | None) -> tuple[float, float]:
    """(sum of value times weight, weight): element by element for a 1-d leaf under a 1-d weight."""
    if not isinstance(value, list):
        return (value * total if total > 0 else 0.0), total
    if elements is None or len(elements) != len(value):
        given = "the weight is a single number" if elements is None else f"the weight has {len(elements)}"
        raise ValueError(f"a 1-d tensor of {len(value)} elements, while {given}: their lengths must be equal")
    return sum(v * w for v, w in zip(value, elements, strict=True) if w > 0) + 0.0, total


def _combine(op: str, value: float | list[float]) -> float:
    """One rank's own value under an op other than mean; a 1-d value is combined over its elements first."""
    values = value if isinstance(value, list) else [value]
    if op in ("any", "all"):
        if any(flag not in (0.0, 1.0) for flag in values):
            raise ValueError(f"{_shorten(value)}, which is not a flag; a flag is a bool, 0 or 1")
        return float(any(values) if op == "any" else all(values))
    if op == "sum":
        return sum(values) + 0.0
    if not values:
        raise ValueError(f"empty, and has no {op}")
    if any(map(math.isnan, values)):
        return math.nan
    return min(values) if op == "min" else max(values)


def _elements(value: Any) -> float | list[float]:
    """A scalar as float, a 1-d tensor or array of another length than 1 as a list of floats."""
    if isinstance(value, torch.Tensor):
        return _tensor_elements(value)
    size, dims = getattr(value, "size", None), getattr(value, "ndim", None)
    if isinstance(size, int) and isinstance(dims, int):  # numpy
        if size != 1 and dims != 1:
            raise ValueError(f"an array of shape {value.shape}; a leaf is a scalar or 1-d")
        if size != 1:
            return [float(item) for item in value.tolist()]
        value = value.item() if hasattr(value, "item") else value  # `float` of a numpy complex drops a part of it
    if isinstance(value, complex):
        raise ValueError("complex; log its real part, imaginary part or absolute value")
    if not hasattr(value, "__float__"):
        raise TypeError(f"of type {type(value).__qualname__}, which is not a number")
    return float(value)


def _tensor_elements(tensor: torch.Tensor) -> float | list[float]:
    if tensor.is_complex():
        raise ValueError("a complex tensor; log its real part, imaginary part or absolute value")
    if hasattr(tensor, "placements"):
        raise ValueError("a DTensor; pass .full_tensor() (a collective) or .to_local() of it")
    if tensor.numel() == 1:
        return float(tensor.item())
    if tensor.dim() != 1:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)}; a leaf is a scalar, or 1-d like a 1-d weight")
    return [float(item) for item in tensor.tolist()]


def _path_of(flat: Flat, index: int) -> Path:
    return next(islice(iter_leaves(flat.structure.schema), index, None))[0]


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
