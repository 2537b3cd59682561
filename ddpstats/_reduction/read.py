"""Read the values of the leaves: one rank's part of a reduction, in float64 on the host.

1. `Prepared` flattens the stats and starts one copy to the host for everything that lives on an accelerator. It
   never raises: what is wrong with this rank's stats becomes a `Failure`, so that the rank still takes part in the
   collective and says so.
2. `Prepared.part` waits for that copy and computes, per leaf, what goes into the sum. Masked before multiplied: an
   entry of weight 0 contributes nothing, whatever its value, because 0 times infinity is NaN.

One rule keeps every sum and product within a float64: a weight is 0 or between 1e-100 and 1e100, and a finite value is
at most 1e200 in size.
"""

from __future__ import annotations

import math
import numbers
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch

from ddpstats._base.lazy import is_fake
from ddpstats._ranks.exchange import Failure
from ddpstats._reduction.flatten import CannotRead, Flat, Structure, flatten, is_numpy
from ddpstats._reduction.ops import NONE, OPS, Marker, Mean, Op

LIGHTEST, HEAVIEST, LARGEST = 1e-100, 1e100, 1e200
"""The smallest and the largest weight, and the largest finite value."""

WRONG_WEIGHT = f"a weight is 0, or between {LIGHTEST:g} and {HEAVIEST:g}; only the ratios of weights count in a mean"
WRONG_VALUE = f"a finite value is at most {LARGEST:g} in size; scale it"

_is_cpu = attrgetter("is_cpu")
MANY = 256
"""Below this many elements a list comprehension beats the fixed cost of torch calls (measured on torch 2.13, CPU)."""

_CHUNK = 4096


class Part(NamedTuple):
    """One rank's numbers, one entry per leaf of the structure.

    Attributes:
        sums: value times weight for means, the total for every other op.
        weights: one for all leaves, or one each.
        weight: what this rank adds to the total weight of the call.
        is_finite: no NaN or infinity among the sums.
        values: what this rank alone would have as the result, NaN where it has no value; None where the call does not
            ask.
        nonfinite: leaves with a finite sum that had a NaN or an infinity too, in another add of a window.
    """

    structure: Structure
    sums: array[float]
    weights: float | array[float]
    weight: float
    is_finite: bool
    values: array[float] | None = None
    nonfinite: tuple[int, ...] = ()


class ReductionInput(Protocol):
    """One rank's part of a reduction, possibly not read yet."""

    def part(self) -> Part | Failure:
        """Return its numbers, or a `Failure`; never raises, so that the rank takes part in any case."""


class Prepared:
    """Flattened stats, or the failure to read them."""

    def __init__(self, stats: Any, weight: Any, keep_dtypes: bool = False, per_rank: bool = False) -> None:
        self._weight, self._per_rank = weight, per_rank
        self._copy: HostCopy | None = None
        self._part: Part | Failure
        try:
            self._flat = flatten(stats, keep_dtypes)
            self._copy = _start_copy(self._flat, weight)
            if self._copy is None:
                self._part = part_of(self._flat, weight, per_rank)
            else:  # what is on the host is read later, with the rest, and may change until then
                self._flat = Flat(self._flat.structure, list(map(_snapshot, self._flat.leaves)))
                self._weight = _snapshot(weight)
        except CannotRead as error:
            self._part = error.failure
        except Exception as error:  # whatever a foreign leaf type raises: this rank must still take part
            self._part = Failure("", f"the stats cannot be read: {type(error).__name__}: {error}")

    def part(self) -> Part | Failure:
        """Wait for the copy to the host, if there is one; never raises."""
        if self._copy is not None:
            try:
                leaves, weight = self._copy.wait(self._flat.leaves, self._weight)
                self._part = part_of(Flat(self._flat.structure, leaves), weight, self._per_rank)
            except CannotRead as error:
                self._part = error.failure
            except Exception as error:
                self._part = Failure("", f"the stats cannot be copied to the host: {type(error).__name__}: {error}")
            self._copy = None
        return self._part


def _start_copy(flat: Flat, weight: Any) -> HostCopy | None:
    if not accelerator_in_use() and not isinstance(weight, torch.Tensor):
        return None
    reading = flat.structure.reading
    if _is_on_host(weight) and (reading == "numbers" or (reading == "tensors" and all(map(_is_cpu, flat.leaves)))):
        return None
    return HostCopy.start_if_needed(flat.leaves, weight)


def _is_on_host(weight: Any) -> bool:
    return not isinstance(weight, torch.Tensor) or weight.is_cpu


def _snapshot(value: Any) -> Any:
    """Return a leaf as it is now; what lives on an accelerator is in the copy already."""
    if isinstance(value, Marker):
        return with_inner(value, _snapshot)
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.is_cpu and not hasattr(value, "placements") else value
    return value.copy() if is_numpy(value) else value


def with_inner(marker: Marker, change: Callable[[Any], Any]) -> Marker:
    """Return the marker around changed contents: value, and weight where it has one."""
    if isinstance(marker, Mean):
        return Mean(change(marker.value), change(marker.weight))
    return type(marker)(change(marker.value))


def accelerator_in_use() -> bool:
    """Return False only where no tensor can be anywhere but in host memory: then none of them need be asked."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 without an accelerator
        return False
    return accelerator is not None and (accelerator.type != "cuda" or torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


# -- all leaves at once -----------------------------------------------------------------------------------------------


def part_of(flat: Flat, weight: Any, per_rank: bool) -> Part:
    """Read all leaves. Raises `CannotRead`."""
    total, elements = read_weight(weight)
    values = read_plain(flat) if elements is None else None
    if values is None or total == 0:
        return _read_each(flat, total, elements)
    sums = scaled(values, total)
    finite = are_finite(sums)
    if not are_small(sums, LARGEST * total):
        for index, value in enumerate(values):
            if LARGEST < abs(value) < math.inf:
                raise CannotRead(flat.structure.leaves[index][0], f"the value is {value!r}; {WRONG_VALUE}")
    return Part(flat.structure, sums, total, total, finite, values if per_rank else None)


def read_plain(flat: Flat) -> array[float] | None:
    """Return the values where every leaf is a plain scalar, at C speed; None where they must be read one by one."""
    leaves, reading = flat.leaves, flat.structure.reading
    if reading == "general":
        return None
    try:
        if reading == "numbers":
            return _as_array(leaves)
        if reading == "plain":
            return array("d", [leaf.item() if type(leaf) is torch.Tensor else leaf for leaf in leaves])
        if flat.structure.one_dtype and len(leaves) >= MANY and leaves[0].numel() == 1:
            stacked = array("d", bytes(8 * len(leaves)))
            as_tensor(stacked).copy_(torch.stack(leaves).detach().view(-1))  # refuses tensors that differ in shape
            return stacked
        if len(leaves) < _CHUNK:
            return array("d", [*map(torch.Tensor.item, leaves)])
        return _as_array(map(torch.Tensor.item, leaves))
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None


def _as_array(values: Iterable[float]) -> array[float]:
    """Return ``values`` as float64. From lists an array is filled a sixth faster than from an iterator."""
    result, rest = array("d"), iter(values)
    while chunk := list(islice(rest, _CHUNK)):
        result.fromlist(chunk)
    return result


def as_tensor(values: array[float]) -> torch.Tensor:
    """Return a view, not a copy, of at least one value."""
    return torch.frombuffer(values, dtype=torch.float64)


def scaled(values: array[float], weight: float) -> array[float]:
    """Return ``values`` times ``weight``."""
    if len(values) < MANY:
        return array("d", [value * weight for value in values])
    result = array("d", values)
    as_tensor(result).mul_(weight)
    return result


def are_finite(values: array[float]) -> bool:
    """Return whether there is no NaN and no infinity: a finite sum proves it; otherwise each element is checked."""
    total = sum(values) if len(values) < MANY else as_tensor(values).sum().item()
    return math.isfinite(total) or all(map(math.isfinite, values))


def are_small(values: array[float], limit: float) -> bool:
    """Return whether no value is NaN, infinite or larger than ``limit`` in size."""
    if len(values) < MANY:
        return math.hypot(*values) <= limit or all(abs(value) <= limit for value in values)
    return as_tensor(values).abs().max().item() <= limit


# -- leaf by leaf -----------------------------------------------------------------------------------------------------


def _read_each(flat: Flat, total: float, elements: list[float] | None) -> Part:
    sums, weights, values = array("d"), array("d"), array("d")
    for index, leaf in enumerate(flat.leaves):
        summed, weight, value = read_leaf(leaf, flat.structure, index, total, elements)
        sums.append(summed)
        weights.append(weight)
        values.append(value)
    return Part(flat.structure, sums, weights, total, are_finite(sums), values)


def read_leaf(
    leaf: Any, structure: Structure, index: int, total: float, elements: list[float] | None
) -> tuple[float, float, float]:
    """Return the sum, the weight, and what this rank alone would have as the result. Raises `CannotRead`."""
    path, op_name = structure.leaves[index]
    if op_name == NONE.name:
        return 0.0, 0.0, math.nan
    op = OPS[op_name]
    try:
        inner = leaf.value if isinstance(leaf, Marker) else leaf
        if isinstance(leaf, Mean) and leaf.weight is not None:
            total, elements = _read_own_weight(leaf.weight)
        values = elements_of(inner)
        if op.is_weighted:
            return _weigh(op, values, total, elements)
        summed = combine(op, values)
    except Exception as error:
        raise cannot_read(path, error) from None
    return summed, 1.0, float(op.finish(summed, 1.0))


def cannot_read(path: Sequence[Any], error: Exception) -> CannotRead:
    """Return what to raise for a leaf whose value could not be read: by our checks, or by code of a foreign type."""
    is_ours = isinstance(error, (TypeError, ValueError, RuntimeError, OverflowError))
    what = f"is {error}" if is_ours else f"cannot be read: {type(error).__name__}: {error}"
    return CannotRead(tuple(path), f"the value {what}")


def _read_own_weight(weight: Any) -> tuple[float, list[float] | None]:
    try:
        return read_weight(weight)
    except CannotRead as error:
        raise ValueError(f"a Mean for which {error}") from None


def _weigh(
    op: Op, values: float | list[float], total: float, elements: list[float] | None
) -> tuple[float, float, float]:
    """Sum value times weight: element by element for a 1-d leaf under a 1-d weight."""
    if not isinstance(values, list):
        value = op.prepare(values)
        return (value * total if total else 0.0), total, value
    check_lengths(len(values), None if elements is None else len(elements))
    assert elements is not None
    summed = sum((op.prepare(v) * w for v, w in zip(values, elements, strict=True) if w > 0), 0.0)
    return summed, total, summed / total if total else math.nan


def check_lengths(values: int, weights: int | None) -> None:
    """Raise ValueError for a 1-d leaf whose length is not that of the weight."""
    if values != weights:
        has = "is a single number" if weights is None else f"has {weights}"
        raise ValueError(f"a 1-d tensor of {values} elements, while the weight {has}: their lengths must be equal")


def combine(op: Op, value: float | list[float]) -> float:
    """Fold the elements of one leaf under an op other than the mean."""
    values = value if isinstance(value, list) else [value]
    if op.is_flag and any(flag not in (0.0, 1.0) for flag in values):
        raise ValueError(f"{_shorten(value)}, which is not a flag; a flag is a bool, 0 or 1")
    prepared = [op.prepare(element) for element in values]
    if op.elements == "sum":
        return sum(prepared, 0.0) if len(prepared) != 1 else prepared[0]
    if not prepared:
        if op.is_flag:
            return float(op.elements == "min")
        raise ValueError(f"empty, and has no {op.name}")
    return math.nan if any(map(math.isnan, prepared)) else (min if op.elements == "min" else max)(prepared)


def read_weight(weight: Any) -> tuple[float, list[float] | None]:
    """Return the total weight, and the elements of a 1-d weight. Raises `CannotRead` for what cannot be a weight."""
    try:
        value = elements_of(weight) if type(weight) is not float else weight
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).partition(";")[0]  # what follows explains leaves
        raise CannotRead((), f"the weight is {reason}; it is a real number or a 1-d tensor") from None
    elements = value if isinstance(value, list) else [value]
    if not all(element == 0 or LIGHTEST <= element <= HEAVIEST for element in elements):
        raise CannotRead((), f"the weight is {_shorten(weight)}; {WRONG_WEIGHT}")
    return math.fsum(elements), elements if isinstance(value, list) else None


def elements_of(value: Any) -> float | list[float]:
    """Return a scalar as float, a 1-d tensor or array of another length than 1 as a list of floats."""
    if isinstance(value, float):  # numpy's float64 too
        return _checked(float(value))
    if isinstance(value, torch.Tensor):
        refuse_tensor(value)
        dense = value if value.layout is torch.strided else value.to_dense()
        items = [float(item) for item in dense.detach().reshape(-1).tolist()]
    elif is_numpy(value):
        items = _numpy_elements(value)
    else:
        return _checked(_number(value))
    for item in items:
        _checked(item)
    return items[0] if len(items) == 1 else items


_REAL_KINDS = "biufO"  # of numpy's dtypes; an array of objects may hold numbers


def _numpy_elements(value: Any) -> list[float]:
    if value.dtype.kind not in _REAL_KINDS or hasattr(value, "mask"):
        raise TypeError(f"of type {type(value).__qualname__}, dtype {value.dtype}, which is not a number")
    if value.size != 1 and value.ndim != 1:
        raise ValueError(f"an array of shape {value.shape}; a leaf is a scalar or 1-d")
    return list(map(_number, value.reshape(-1).tolist()))


def _number(value: Any) -> float:
    """Return one number; not of a tensor, nor of an array."""
    if isinstance(value, complex):
        raise ValueError("complex; log its real part, imaginary part or absolute value")
    if not hasattr(value, "__float__") or getattr(getattr(value, "dtype", None), "kind", "f") not in _REAL_KINDS:
        raise TypeError(f"of type {type(value).__qualname__}, which is not a number")
    number = float(value)
    if math.isinf(number) and isinstance(value, numbers.Number) and value != number:  # type: ignore[comparison-overlap]
        raise OverflowError(f"{_shorten(value)}, which is too large for a float64")
    return number


def _checked(value: float) -> float:
    if LARGEST < abs(value) < math.inf:
        raise ValueError(f"{value!r}; {WRONG_VALUE}")
    return value


def refuse_tensor(tensor: torch.Tensor) -> None:
    """Raise ValueError for what is no leaf, as far as that can be said without its value."""
    if is_fake(tensor):
        raise ValueError("a FakeTensor, which has a shape but no value; pass a tensor made outside of FakeTensorMode")
    if tensor.is_complex():
        raise ValueError("a complex tensor; log its real part, imaginary part or absolute value")
    if hasattr(tensor, "placements"):
        raise ValueError("a DTensor; pass .full_tensor() (a collective) or .to_local() of it")
    if tensor.is_nested or tensor.is_quantized:
        raise ValueError("a nested or quantized tensor, which is not a number")
    if tensor.numel() != 1 and tensor.dim() != 1:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)}; a leaf is a scalar, or 1-d like a 1-d weight")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# -- what lives on an accelerator -------------------------------------------------------------------------------------


class HostCopy:
    """One copy to the host for all tensors that live on accelerators, without waiting for it.

    Tensors are concatenated on their device per dtype, widened to float64 there, and copied as one piece per device
    into pinned memory. An event marks its end, so that the caller's thread goes on and the worker waits.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._pieces = [_Piece(device, tensors) for device in dict.fromkeys(tensor.device for tensor in tensors)]

    @classmethod
    def start_if_needed(cls, leaves: list[Any], weight: Any) -> HostCopy | None:
        """Start copying what is not in host memory; return None if everything is."""
        tensors: list[torch.Tensor] = []

        def collect(value: Any) -> None:
            if isinstance(value, torch.Tensor) and is_away(value):
                tensors.append(value)

        for leaf in (*leaves, weight):
            with_inner(leaf, collect) if isinstance(leaf, Marker) else collect(leaf)
        return cls(tensors) if tensors else None

    def wait(self, leaves: list[Any], weight: Any) -> tuple[list[Any], Any]:
        """Return ``leaves`` and ``weight`` with their float64 copies in host memory in place of such tensors."""
        copies: dict[int, torch.Tensor] = {}
        for piece in self._pieces:
            copies.update(piece.wait())

        def copied(value: Any) -> Any:
            return with_inner(value, copied) if isinstance(value, Marker) else copies.get(id(value), value)

        return list(map(copied, leaves)), copied(weight)


class _Piece:
    """The tensors of one device, as one float64 vector."""

    def __init__(self, device: torch.device, tensors: list[torch.Tensor]) -> None:
        own = [tensor for tensor in tensors if tensor.device == device]
        by_dtype = {dtype: [t for t in own if t.dtype == dtype] for dtype in dict.fromkeys(t.dtype for t in own)}
        wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        vector = torch.cat([torch.cat([t.detach().reshape(-1) for t in group]).to(wide) for group in by_dtype.values()])
        self._order = [tensor for group in by_dtype.values() for tensor in group]
        self._event: Any = None
        if device.type == "cuda":
            self._host = torch.empty(vector.shape, dtype=wide, pin_memory=True, device="cpu")
            self._host.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._host = vector.cpu()

    def wait(self) -> dict[int, torch.Tensor]:
        """Return id of the tensor -> its copy, in its shape."""
        if self._event is not None:
            self._event.synchronize()
        parts = torch.split(self._host.to(torch.float64), [tensor.numel() for tensor in self._order])
        return {id(t): part.reshape(t.shape) for t, part in zip(self._order, parts, strict=True)}


def is_away(tensor: torch.Tensor) -> bool:
    """Return whether the tensor must be copied; complex, meta and DTensor values are refused later, with their path."""
    return not tensor.is_cpu and not tensor.is_complex() and not tensor.is_meta and not hasattr(tensor, "placements")
