"""Read the values of the leaves in float64: one rank's part of a reduction, or of one add to a window.

1. `snapshot_if_off_host` starts one copy to the host for all tensors on accelerators, and does not wait for it.
2. `read_row` reads every leaf: all together where they are plain scalars, otherwise one by one.
3. `prepare` makes a reduction's part, and never raises: what is wrong with this rank's stats becomes a `Failure`, so
   that the rank still takes part in the collective and says so.

A leaf of weight 0 contributes nothing, whatever its value, because 0 times infinity is NaN. One rule keeps every sum
and product within a float64: a weight is 0 or between 1e-100 and 1e100, and a finite value is at most 1e200 in size.
"""

from __future__ import annotations

import math
import numbers
import struct
from array import array
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter, mul
from typing import Any, NamedTuple, TypeAlias

import torch

from ddpstats._base.caches import EmptiedCache
from ddpstats._base.lazy import is_fake
from ddpstats._ranks.device import HostCopy, accelerator_in_use, is_capturing
from ddpstats._ranks.exchange import Failure, InvalidLeaf, failure_of
from ddpstats._reduction.flatten import INTERCHANGEABLE, NUMBERS, Flat, Structure, flatten, is_numpy
from ddpstats._reduction.ops import NONE, OPS, Marker, Mean, Op, identity
from ddpstats.errors import ConfigError

# The smallest and the largest weight, and the largest finite value.
LIGHTEST, HEAVIEST, LARGEST = 1e-100, 1e100, 1e200

_WRONG_WEIGHT = f"a weight is 0, or between {LIGHTEST:g} and {HEAVIEST:g}; only the ratios of weights count in a mean"

_is_cpu = attrgetter("is_cpu")
# Below this many elements a list comprehension beats the fixed cost of torch calls (measured on torch 2.13, CPU).
MANY = 256


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


class PartOnDevice(NamedTuple):
    """One rank's part of which some numbers are on their way to the host.

    Attributes:
        has_arrived: whether ``read`` would return at once. Neither of them raises: this rank must take part.
        read: waits for the numbers and returns the part.
    """

    has_arrived: Callable[[], bool]
    read: Callable[[], Part | Failure]


def prepare(
    stats: Any, weight: Any, keep_dtypes: bool = False, per_rank: bool = False
) -> Part | Failure | PartOnDevice:
    """Return one rank's part of a reduction as it is now."""
    try:
        flat = flatten(stats, keep_dtypes)
        snapshot = snapshot_if_off_host(flat, weight)
        if snapshot is None:
            return _part_of(flat, weight, per_rank)
    except Exception as error:  # whatever a foreign leaf type raises: this rank must still take part
        return failure_of(error, "the stats cannot be read")

    def has_arrived() -> bool:
        with suppress(Exception):  # of the device; `read` raises it again, and reports it
            return snapshot.is_ready()
        return True

    def read() -> Part | Failure:
        try:
            return _part_of(*snapshot.wait(), per_rank)
        except Exception as error:
            return failure_of(error, "the stats cannot be copied to the host")

    return PartOnDevice(has_arrived, read)


def _part_of(flat: Flat, weight: Any, per_rank: bool) -> Part:
    values, weights, total, is_finite, sums = read_row(flat, weight)
    own_values = values if per_rank else None
    if per_rank and sums is None and not isinstance(weights, float):
        ops = flat.structure.ops
        own_values = array("d", [float(op.finish(value, 1.0)) for op, value in zip(ops, values, strict=True)])
    sums = _scale(values, weights) if sums is None else sums
    return Part(flat.structure, sums, weights, total, is_finite, own_values)


# -- all leaves at once -----------------------------------------------------------------------------------------------


# The leaves of one call as numbers:
#
# 1. What each leaf alone comes to, over its elements; before ``Op.finish`` where there are no sums.
# 2. The weights: one for all leaves, or one each; 1 for every op other than the mean.
# 3. The weight of the call.
# 4. Whether there is no NaN or infinity among the sums.
# 5. The sums: value times weight, summed element by element; None where they are the product of the first two.
Row: TypeAlias = "tuple[array[float], float | array[float], float, bool, array[float] | None]"


def read_row(flat: Flat, weight: Any) -> Row:
    """Read all leaves. Raises `InvalidLeaf`."""
    total, elements = read_weight(weight)
    if elements is None and total:
        row = plan_of(flat).read(flat.leaves, total)
        if row is not None:
            return row
    sums, weights, values = array("d"), array("d"), array("d")
    for index, leaf in enumerate(flat.leaves):
        summed, own_weight, value = _read_leaf(leaf, flat.structure, index, total, elements)
        sums.append(summed)
        weights.append(own_weight)
        values.append(value)
    return values, weights, total, all(map(math.isfinite, sums)), sums


class Plan:
    """A way to read the leaves of one structure together: scalars, of which some may have a marker."""

    def __init__(self, flat: Flat) -> None:
        structure, ops = flat.structure, flat.structure.ops
        self._reading = structure.reading
        self._is_usable = self._reading != "general" or (NONE not in ops and all(op.prepare is identity for op in ops))
        self._markers = [index for index, leaf in enumerate(flat.leaves) if isinstance(leaf, Marker)]
        self._means = [index for index, leaf in enumerate(flat.leaves) if isinstance(leaf, Mean)]
        self._flags = [index for index, op in enumerate(ops) if op.is_flag]
        self._is_weighted = [op.is_weighted for op in ops]
        self._pack = struct.Struct(f"{len(ops)}d").pack
        self._last_weights = math.nan, array("d")

    def read(self, leaves: list[Any], total: float) -> Row | None:
        """Return the leaves as numbers; None where they must be read one by one.

        ``total``: the weight of the call, not 0.
        """
        weights = total if self._reading != "general" else self._weights(leaves, total)
        if weights is None or not self._is_usable:
            return None
        if self._markers:
            leaves = leaves.copy()
            for index in self._markers:
                leaves[index] = leaves[index].value
        try:
            if self._reading != "numbers":
                leaves = self._numbers(leaves)
            values = array("d", self._pack(*leaves))  # in a third of the time that an array of the list takes
            is_small = math.hypot(*leaves) <= LARGEST  # which proves that all are finite, and none is too large
        except (RuntimeError, TypeError, ValueError, struct.error):
            return None
        if not is_small and any(LARGEST < abs(value) < math.inf for value in values):
            return None
        if self._flags and any(values[index] not in (0.0, 1.0) for index in self._flags):
            return None
        return values, weights, total, is_small or all(map(math.isfinite, values)), None

    def _weights(self, leaves: list[Any], total: float) -> array[float] | None:
        """Return the weight of each leaf: the same array as long as no marker has its own."""
        last, shared = self._last_weights
        if last != total:
            shared = array("d", [total if is_weighted else 1.0 for is_weighted in self._is_weighted])
            self._last_weights = total, shared
        weights = shared
        for index in self._means:
            weight = leaves[index].weight
            if weight is not None:
                if type(weight) not in (float, int) or not LIGHTEST <= weight <= HEAVIEST:
                    return None
                weights = array("d", shared) if weights is shared else weights
                weights[index] = weight
        return weights

    def _numbers(self, leaves: list[Any]) -> list[Any]:
        """Return the numbers in numbers and tensors of one element. Raises what torch raises for any other."""
        if self._reading == "tensors":
            return [*map(torch.Tensor.item, leaves)]
        if not INTERCHANGEABLE.issuperset(map(type, leaves)):
            raise TypeError("a leaf that is read by itself")
        tensor = torch.Tensor
        return [leaf.item() if type(leaf) is tensor else leaf for leaf in leaves]


_plans: EmptiedCache[Structure, Plan] = EmptiedCache(max_entries=64, max_cost=65_536)


def plan_of(flat: Flat) -> Plan:
    """Return how to read leaves of this structure together."""
    return _plans.get(flat.structure) or _plans.keep(flat.structure, Plan(flat), len(flat.leaves) + 1)


def as_tensor(values: array[float]) -> torch.Tensor:
    """Return a view, not a copy, of at least one value."""
    return torch.frombuffer(values, dtype=torch.float64)


def _scale(values: array[float], weights: float | array[float]) -> array[float]:
    """Return ``values`` times ``weights``, which are positive."""
    if len(values) >= MANY:
        result = array("d", values)
        as_tensor(result).mul_(weights if isinstance(weights, float) else as_tensor(weights))
        return result
    if isinstance(weights, float):
        return array("d", [value * weights for value in values])
    return array("d", [value * weight for value, weight in zip(values, weights, strict=True)])


# -- leaf by leaf -----------------------------------------------------------------------------------------------------


def _read_leaf(
    leaf: Any, structure: Structure, index: int, total: float, elements: list[float] | None
) -> tuple[float, float, float]:
    """Return the sum, the weight, and what this rank alone would have as the result. Raises `InvalidLeaf`."""
    path, op_name = structure.leaves[index]
    if op_name == NONE.name:
        return 0.0, 0.0, math.nan
    op = OPS[op_name]
    try:
        inner = leaf.value if isinstance(leaf, Marker) else leaf
        if isinstance(leaf, Mean) and leaf.weight is not None:
            total, elements = read_weight(leaf.weight)
        values = elements_of(inner)
        if op.is_weighted:
            return _weigh(op, values, total, elements)
        summed = _combine(op, values)
    except InvalidLeaf as error:  # of the marker's own weight
        raise InvalidLeaf(path, f"the value is a Mean for which {error}") from None
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidLeaf(path, f"the value is {error}") from None
    except Exception as error:  # of a foreign type's code
        raise InvalidLeaf(path, f"the value cannot be read: {type(error).__name__}: {error}") from None
    return summed, 1.0, float(op.finish(summed, 1.0))


def _weigh(
    op: Op, values: float | list[float], total: float, elements: list[float] | None
) -> tuple[float, float, float]:
    """Sum value times weight: element by element for a 1-d leaf under a 1-d weight."""
    if not isinstance(values, list):
        value = op.prepare(values)
        return (value * total if total else 0.0), total, value
    if elements is None or len(values) != len(elements):
        has = "is a single number" if elements is None else f"has {len(elements)}"
        raise ValueError(f"a 1-d tensor of {len(values)} elements, while the weight {has}: their lengths must be equal")
    summed = sum(map(mul, values, elements), 0.0) if op.prepare is identity else math.nan
    if not math.isfinite(summed):  # an element of weight 0 may be infinite
        summed = sum((op.prepare(v) * w for v, w in zip(values, elements, strict=True) if w > 0), 0.0)
    return summed, total, summed / total if total else math.nan


def _combine(op: Op, value: float | list[float]) -> float:
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
    """Return the total weight, and the elements of a 1-d weight. Raises `InvalidLeaf` for what cannot be a weight."""
    if type(weight) is float and LIGHTEST <= weight <= HEAVIEST:
        return weight, None
    try:
        value = elements_of(weight) if type(weight) is not float else weight
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).partition(";")[0]  # what follows explains leaves
        raise InvalidLeaf((), f"the weight is {reason}; it is a real number or a 1-d tensor") from None
    elements = value if isinstance(value, list) else [value]
    if not all(element == 0 or LIGHTEST <= element <= HEAVIEST for element in elements):
        raise InvalidLeaf((), f"the weight is {_shorten(weight)}; {_WRONG_WEIGHT}")
    return math.fsum(elements), elements if isinstance(value, list) else None


def elements_of(value: Any) -> float | list[float]:
    """Return a scalar as float, a 1-d tensor or array of another length than 1 as a list of floats."""
    if isinstance(value, float):  # numpy's float64 too
        return _check_size(float(value))
    if isinstance(value, torch.Tensor):
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided and value.is_cpu
        if is_plain and value.numel() == 1 and value.is_floating_point() and not value.is_nested:
            return _check_size(value.item())
        _refuse_tensor(value)
        items = list(map(float, _vector(value).tolist()))
    elif is_numpy(value):
        items = _numpy_elements(value)
    else:
        return _check_size(_number(value))
    if not math.hypot(*items) <= LARGEST:
        for item in items:
            _check_size(item)
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


def _check_size(value: float) -> float:
    if LARGEST < abs(value) < math.inf:
        raise ValueError(f"{value!r}; a finite value is at most {LARGEST:g} in size; scale it")
    return value


def _refuse_tensor(tensor: torch.Tensor) -> None:
    """Raise ValueError for what is no leaf, as far as that can be said without its value."""
    if is_fake(tensor):
        raise ValueError("a FakeTensor, which has a shape but no value; pass a tensor made outside of FakeTensorMode")
    if tensor.is_complex():
        raise ValueError("a complex tensor; log its real part, imaginary part or absolute value")
    if tensor.is_meta:
        raise ValueError("a meta tensor, which has a shape but no value; pass a tensor with a value")
    if hasattr(tensor, "placements"):
        raise ValueError("a DTensor; pass .full_tensor() (a collective) or .to_local() of it")
    if tensor.is_nested or tensor.is_quantized:
        raise ValueError("a nested or quantized tensor, which is not a number")
    if tensor.numel() != 1 and tensor.dim() != 1:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)}; a leaf is a scalar, or 1-d like a 1-d weight")


def _vector(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements [elements], without a graph."""
    detached = tensor.detach()
    return (detached if detached.layout is torch.strided else detached.to_dense()).reshape(-1)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# -- what lives on an accelerator -------------------------------------------------------------------------------------


def snapshot_if_off_host(flat: Flat, weight: Any) -> Snapshot | None:
    """Return a snapshot that copies what is not in host memory; None where everything is."""
    reading, is_weight_tensor = flat.structure.reading, isinstance(weight, torch.Tensor)
    if (reading == "numbers" and not is_weight_tensor) or not accelerator_in_use():
        return None
    if reading == "tensors" and not is_weight_tensor and all(map(_is_cpu, flat.leaves)):
        return None
    tensors: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor) and is_off_host(value):
            tensors.append(value)

    _map_values(flat, weight, collect)
    return Snapshot(flat, weight, tensors) if tensors else None


def is_off_host(tensor: torch.Tensor) -> bool:
    """Return whether the tensor must be copied; one that is no leaf is refused later, with its path."""
    if tensor.is_cpu:
        return False
    try:
        _refuse_tensor(tensor)
    except ValueError:
        return False
    return True


class _OffHost(NamedTuple):
    """Stands for a tensor on an accelerator, which would keep its graph alive."""

    key: int
    shape: torch.Size


class Snapshot:
    """The stats of one call as they are now: one copy to the host for all tensors on accelerators, not waited for.

    What is in host memory is copied too, and may change afterwards. No graph is kept alive.
    """

    def __init__(self, flat: Flat, weight: Any, tensors: list[torch.Tensor]) -> None:
        self._copies = [_DeviceCopy(device, tensors) for device in dict.fromkeys(tensor.device for tensor in tensors)]
        off_host = {id(tensor): _OffHost(id(tensor), tensor.shape) for tensor in tensors}

        def keep_value(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return off_host.get(id(value)) or (value.detach().clone() if value.is_cpu else value)
            if is_numpy(value):
                return value.copy()
            if value is None or type(value) in NUMBERS:
                return value
            with suppress(Exception):  # a foreign type; what it refuses is refused when it is read
                return elements_of(value)
            return value

        self._flat, self._weight = _map_values(flat, weight, keep_value)

    def is_ready(self) -> bool:
        """Return whether `wait` would return at once."""
        return all(copy.is_ready() for copy in self._copies)

    def wait(self) -> tuple[Flat, Any]:
        """Return the stats and the weight, with float64 copies in host memory in place of tensors on accelerators."""
        on_host: dict[int, torch.Tensor] = {}
        for copy in self._copies:
            on_host.update(copy.wait())
        return self._with(lambda value: on_host[value.key])

    def check(self) -> None:
        """Raise `InvalidLeaf` for what is wrong whatever the values on accelerators are: each of them reads as 1."""
        read_row(*self._with(lambda value: _ONE.expand(value.shape)))

    def _with(self, replace: Callable[[_OffHost], torch.Tensor]) -> tuple[Flat, Any]:
        return _map_values(
            self._flat, self._weight, lambda value: replace(value) if isinstance(value, _OffHost) else value
        )


_ONE = torch.ones((), dtype=torch.float64, device="cpu")


def _map_values(flat: Flat, weight: Any, change: Callable[[Any], Any]) -> tuple[Flat, Any]:
    """Return the stats and the weight with ``change`` of each value and of each marker's own weight."""

    def change_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Mean):
            return Mean(change(leaf.value), change(leaf.weight))
        return type(leaf)(change(leaf.value)) if isinstance(leaf, Marker) else change(leaf)

    return Flat(flat.structure, list(map(change_leaf, flat.leaves))), change(weight)


class _DeviceCopy:
    """The tensors of one device, on their way to the host as one vector of bytes; they are widened there.

    They are concatenated on their device, per dtype, largest elements first: so each part begins where its dtype may.
    """

    def __init__(self, device: torch.device, tensors: list[torch.Tensor]) -> None:
        if is_capturing():
            raise ConfigError("a CUDA graph is captured: only its replays compute. Add, and reduce, outside of it")
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in sorted(tensors, key=torch.Tensor.element_size, reverse=True):
            if tensor.device == device:
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        vectors = [torch.cat(list(map(_vector, group))) for group in by_dtype.values()]
        self._vectors = [(vector.dtype, vector.nbytes) for vector in vectors]
        self._parts = [(id(tensor), tensor.shape) for group in by_dtype.values() for tensor in group]
        self._copy = HostCopy(torch.cat([vector.view(torch.uint8) for vector in vectors]))

    def is_ready(self) -> bool:
        return self._copy.is_ready()

    def wait(self) -> dict[int, torch.Tensor]:
        """Return id of the tensor -> its copy in float64, in its shape."""
        pieces = torch.split(self._copy.wait(), [size for _, size in self._vectors])
        numbers = [piece.view(dtype) for piece, (dtype, _) in zip(pieces, self._vectors, strict=True)]
        wide = torch.cat([vector.to(torch.float64) for vector in numbers])
        vectors = torch.split(wide, [shape.numel() for _, shape in self._parts])
        return {key: vector.reshape(shape) for (key, shape), vector in zip(self._parts, vectors, strict=True)}
