"""Functions to import in place of copies that trees keep, aligned by key: one collective for all values of a call.

- `recursive_average`, `recursive_sum`, `recursive_divide`: espnet's ``torch_utils.recursive_op``, which FunASR copied.
  Positional signatures are espnet's. Ranks may hold different keys, lists of different lengths, None and {}; int and
  bool leaves work; each mean is divided by the weight of the ranks that hold its path.
- `reduce_dict`: of DETR, torchvision's references and detectron2.
- `parse_losses`: mmdetection's ``_parse_losses``.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from ddpstats._base.lazy import breaks_graph
from ddpstats._base.paths import Path
from ddpstats._base.text import first_line
from ddpstats._ranks.calls import ALONE
from ddpstats._ranks.device import accelerator_in_use
from ddpstats._reduction.flatten import FLOATS, flatten
from ddpstats._reduction.ops import NONE, Marker
from ddpstats._reduction.read import as_tensor
from ddpstats._reduction.reducer import NonFinitePolicy, kept_reducer, reduce_stats
from ddpstats._reduction.result import Entry, Reduced
from ddpstats.errors import InvalidStats

__all__ = ["parse_losses", "recursive_average", "recursive_divide", "recursive_sum", "reduce_dict"]


@breaks_graph
def recursive_sum(obj: Any, weight: torch.Tensor, distributed: bool = False, *, group: Any = None) -> Any:
    """Sum of value times weight, over the elements of each leaf and, if ``distributed``, over ranks.

    Collective if ``distributed``: every rank of ``group`` must call.

    Args:
        obj: nested dicts, lists and tuples; leaves are 1-d tensors of the length of ``weight``, scalars, or None.
        weight: 1-d tensor, not negative; any dtype and device.
        distributed: sum over the ranks of ``group`` as well.

    Returns:
        The union of all ranks' structures, in one order, with 0-d tensors on the device of this rank's leaves
        (``weight``'s where it holds none), which share one storage per dtype. Their dtype is the promoted dtype of the
        ranks' leaves; torch's default dtype for int and bool. None where every holder has None.

    Raises what `StatsReducer` raises.
    """
    summed = _reduce(obj, weight, distributed, group, "recursive_sum", divide=False)
    return _nest(summed, _tensors(summed, obj, weight))


@breaks_graph
def recursive_average(
    obj: Any, weight: torch.Tensor, distributed: bool = False, *, group: Any = None
) -> tuple[Any, torch.Tensor]:
    """Weighted mean of each leaf, over its elements and, if ``distributed``, over the ranks that hold its path.

    Collective if ``distributed``: every rank of ``group`` must call. Arguments and errors as `recursive_sum`.

    Returns:
        (means as `recursive_sum` returns sums, the plain total weight: a 0-d tensor of ``weight``'s dtype and device;
        int64 where an integer dtype cannot hold it).

    Example, with ``weight`` tensor([8.]) on both ranks::

        rank 0: {"l1": tensor([1.])}   rank 1: {"snr": tensor([-2.])}
        both:   ({"l1": tensor(1.), "snr": tensor(-2.)}, tensor(16.))
    """
    averaged = _reduce(obj, weight, distributed, group, "recursive_average")
    return _nest(averaged, _tensors(averaged, obj, weight)), _total(averaged, weight)


# One path of `average_with_weights`: its name as in `Reduced.flat`, its value, and what is known of it.
LeafAverage = tuple[Path, str, torch.Tensor | None, Entry]


@breaks_graph
def average_with_weights(
    obj: Any, weight: torch.Tensor, distributed: bool, nonfinite: NonFinitePolicy
) -> tuple[Any, torch.Tensor, list[LeafAverage]]:
    """`recursive_average`, and each path with the weight of its mean: what a logger must average with.

    Collective in the same way. The tensors of the third result are the very objects of the first, in the same order.
    """
    averaged = _reduce(obj, weight, distributed, None, "recursive_average", nonfinite=nonfinite)
    tensors = _tensors(averaged, obj, weight)
    selection = averaged._selection
    paths = [selection.layout.leaves[slot][0] for slot in selection.slots]
    entries = zip(paths, averaged.entries(), tensors, strict=True)
    leaves = [(path, name, tensor, entry) for path, (name, entry), tensor in entries]
    return _nest(averaged, tensors), _total(averaged, weight), leaves


def recursive_divide(a: Any, b: torch.Tensor) -> Any:
    """Each leaf of ``a`` divided by ``b``; None stays None. Local.

    One divisor cannot be right for paths that only some ranks hold: `recursive_average` divides each by its own weight.
    """
    if isinstance(a, dict):
        return {key: recursive_divide(value, b) for key, value in a.items()}
    if isinstance(a, tuple) and hasattr(a, "_fields"):
        return type(a)(*(recursive_divide(value, b) for value in a))
    if isinstance(a, list | tuple):
        return type(a)(recursive_divide(value, b) for value in a)
    if a is None:
        return None
    if isinstance(a, torch.Tensor):
        return a / b.type(a.dtype) if a.is_floating_point() else a / b
    raise InvalidStats(f"recursive_divide takes tensors and None in dicts, lists and tuples, not {type(a).__name__}")


@breaks_graph
def reduce_dict(input_dict: Mapping[Any, torch.Tensor], average: bool = True) -> dict[Any, torch.Tensor]:
    """Mean of each value over the ranks that hold its key, or the sum with ``average=False``, on every rank.

    Collective: every rank must call, with the same ``average``. Without a process group it is local.

    Args:
        input_dict: 0-d tensors. Ranks may hold different keys, or none.

    Returns:
        The union of all ranks' keys, in one order. Tensors as `recursive_sum` returns them: 0-d, without a gradient, on
        the device of this rank's values (the CPU where it has none), of the dtype that the ranks' promote to; a sum of
        integers is float64, which is exact up to 2**53.

    Raises what `StatsReducer` raises.

    Example::

        rank 0: {"loss": tensor(1.), "loss_dn": tensor(4.)}   rank 1: {"loss": tensor(3.)}
        both:   {"loss": tensor(2.), "loss_dn": tensor(4.)}
    """
    kind = f"reduce_dict(average={bool(average)})"
    reduced = _reduce(input_dict, 1.0, True, None, kind, divide=bool(average))
    of_integers = torch.get_default_dtype() if average else torch.float64
    values: dict[Any, torch.Tensor] = _nest(reduced, _tensors(reduced, input_dict, 1.0, of_integers))
    return values


def parse_losses(losses: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss to differentiate on this rank, and what to log: means over the ranks that hold each key.

    Collective: every rank must call. Without a process group it is local.

    Args:
        losses: tensors, of which the mean counts, and lists of tensors, of whose means the sum counts. Ranks may hold
            different keys.

    Returns:
        (the sum of this rank's values whose keys contain "loss", with its graph, the union of all ranks' keys). The
        latter are floats, the same on every rank; its "loss" is the mean of all ranks' losses.

    Raises what `reduce_stats` raises.

    Example::

        rank 0: {"loss_cls": tensor(1.), "loss_mask": tensor(2.)}   rank 1: {"loss_cls": tensor(3.)}
        both log {"loss_cls": 2.0, "loss_mask": 2.0, "loss": 3.0}; rank 0 differentiates a loss of 3, rank 1 of 3
    """
    means = {name: _mean(value) for name, value in losses.items()}
    numbers = {str(name): mean for name, mean in means.items() if isinstance(mean, torch.Tensor | float | int)}
    loss: Any = sum(mean for name, mean in numbers.items() if "loss" in name)
    log_vars: dict[str, float] = reduce_stats({**means, "loss": loss}, name="parse_losses").values
    return loss, log_vars


# -- inside -----------------------------------------------------------------------------------------------------------


def _reduce(
    obj: Any,
    weight: Any,
    distributed: bool,
    group: Any,
    kind: str,
    *,
    divide: bool = True,
    nonfinite: NonFinitePolicy = "propagate",
) -> Reduced:
    reducer = kept_reducer(group if distributed else ALONE, None, nonfinite, kind)
    return reducer._reduce(obj, weight, keep_dtypes=True, divide=divide)


def _mean(value: Any) -> Any:
    """Return a tensor's mean, or the sum of the means in a list. What has none is left for all ranks to refuse."""
    tensors = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return value
    try:
        return sum((tensor if tensor.is_floating_point() else tensor * 1.0).mean() for tensor in tensors)
    except RuntimeError as error:
        return _WithoutMean(f"without a mean: {first_line(error)}")


class _WithoutMean(ValueError):
    """Stands for tensors of which torch makes no mean, and is raised where the value is read."""

    def __float__(self) -> float:
        raise self


def _nest(reduced: Reduced, tensors: Sequence[torch.Tensor | None]) -> Any:
    return reduced._selection.build(iter(tensors))


def _total(reduced: Reduced, weight: Any) -> torch.Tensor:
    # A number passes as well; what cannot be a weight has raised on every rank by now. `as_tensor` would move a tensor
    # to torch's default device.
    weight_tensor = weight if isinstance(weight, torch.Tensor) else torch.tensor(weight, device="cpu")
    dtype = weight_tensor.dtype
    if dtype == torch.bool or (not weight_tensor.is_floating_point() and reduced.total_weight > torch.iinfo(dtype).max):
        dtype = torch.int64  # as torch's own sum: the total of many bools or uint8 is no longer one
    if dtype.is_floating_point:
        return _vector(array("d", (reduced.total_weight,)), dtype, weight_tensor.device).squeeze()
    return torch.tensor(int(reduced.total_weight), dtype=dtype, device=weight_tensor.device)


def _tensors(
    reduced: Reduced, obj: Any, weight: Any, of_integers: torch.dtype | None = None
) -> Sequence[torch.Tensor | None]:
    """Return the values as 0-d tensors: one tensor per dtype, copied to the device once, and cut up there.

    ``of_integers``: the dtype where no rank has floating numbers; None for torch's default.
    """
    device, selection, values = _device(obj, weight), reduced._selection, reduced._flat
    shared = selection.dtypes.get((), ())  # of a rank whose leaves all have one dtype
    if isinstance(values, array) and len(selection.dtypes) == 1:
        return _vector(values, _promote(shared, of_integers), device).unbind()
    indexes: dict[torch.dtype, list[int]] = {}
    for index, (slot, op) in enumerate(zip(selection.slots, selection.ops, strict=True)):
        if op != NONE.name:
            dtypes = selection.dtypes.get(selection.layout.leaves[slot][0], ())
            indexes.setdefault(_promote(shared + dtypes, of_integers), []).append(index)
    tensors: list[torch.Tensor | None] = [None] * len(values)
    for dtype, chosen in indexes.items():
        made = _vector(array("d", [float(values[index] or 0) for index in chosen]), dtype, device)
        for index, tensor in zip(chosen, made.unbind(), strict=True):
            tensors[index] = tensor
    return tensors


def _vector(values: array[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what `torch.tensor` makes of ``values``, to the bit; without a Python number for each of them."""
    if dtype not in (torch.float32, torch.float64) or not values:
        # torch gives a NaN of half precision other bits when it converts a vector
        return torch.tensor(values, dtype=dtype, device=device)
    return as_tensor(values).to(dtype, copy=True).to(device)


def _device(obj: Any, weight: Any) -> torch.device:
    """Return where the results go: an accelerator if ``weight`` or a leaf is there."""
    device = weight.device if isinstance(weight, torch.Tensor) else torch.device("cpu")
    if device.type == "cpu" and accelerator_in_use():
        for leaf in flatten(obj, keep_dtypes=True).leaves:
            value = leaf.value if isinstance(leaf, Marker) else leaf
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                return value.device
    return device


def _promote(names: tuple[str, ...], of_integers: torch.dtype | None = None) -> torch.dtype:
    floating = [FLOATS[name] for name in names if name in FLOATS]
    return reduce(torch.promote_types, floating) if floating else of_integers or torch.get_default_dtype()
