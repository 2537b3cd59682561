"""Functions that many trees have a copy of: how each is known, and what stands in its place.

1. A `Known` says by which names and parameters a copy goes, since copies rename the latter.
2. Its ``probe`` tries one on small samples, on one and on two pretended ranks, and says what it gives that another
   copy would not: it returns None where nothing is other than expected.
3. Its ``aligned`` makes the function that takes the copy's place. On one rank that is the copy itself.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpstats import recursive_op
from ddpstats._reduction.ops import Max, Sum
from ddpstats._reduction.reducer import NonFinitePolicy, reduce_stats
from ddpstats.errors import SchemaConflict
from ddpstats.integrations._pretended_ranks import has_other_ranks, pretended_ranks

Function = Callable[..., Any]


@dataclass(frozen=True)
class Known:
    """One function that many trees have a copy of.

    Attributes:
        names: what copies are called; with a class of any name before it where the first parameter is ``self``.
        takes: its parameters in words, for messages.
        fits: whether these are a copy's parameters.
        probe: tries a copy, with the class that holds it or None; what it does otherwise than expected, for people.
        aligned: the copy -> what takes its place.
    """

    names: tuple[str, ...]
    takes: str
    fits: Callable[[list[inspect.Parameter]], bool]
    probe: Callable[[Function, type | None], str | None]
    aligned: Callable[[Function], Function]


def _replacing(original: Function, ours: Callable[[dict[str, Any]], Any]) -> Function:
    """``ours`` with the copy's name, signature and documentation; the copy itself where there is one rank.

    ``ours`` takes the arguments of a call by the copy's names, in the copy's order.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def aligned(*args: Any, **kwargs: Any) -> Any:
        if not has_other_ranks():
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        return ours(call.arguments)

    return aligned


# -- espnet's recursive_average and recursive_sum, as FunASR has them -------------------------------------------------


def _takes_distributed(parameters: list[inspect.Parameter]) -> bool:
    return len(parameters) == 3 and parameters[2].default is False


def _probe_recursive(function: Function, average: bool) -> str | None:
    for ranks, distributed in ((1, False), (2, True)):
        values, weight = {"a": torch.tensor([2.0, 5.0]), "b": [None]}, torch.tensor([2.0, 1.0])
        with pretended_ranks(ranks, function):
            found = function(values, weight, distributed)
        one = 3.0 if average else 9.0 * ranks
        expected: Any = {"a": torch.tensor(one), "b": [None]}
        if average:
            expected = (expected, torch.tensor(3.0 * ranks))
        if not _is_same(found, expected):
            return _differs(ranks, found, expected)
    return None


def _align_recursive(original: Function, average: bool) -> Function:
    if not average:
        return _replacing(original, lambda call: recursive_op.recursive_sum(*call.values()))
    nonfinite: NonFinitePolicy = "skip" if _skips_nan(original) else "propagate"
    average_of = recursive_op.average_with_weights
    return _replacing(original, lambda call: average_of(*call.values(), nonfinite=nonfinite)[:2])


def _skips_nan(function: Function) -> bool:
    """Whether another rank's NaN means that it has no value: espnet's models say so, and its newer versions know."""
    with pretended_ranks(2, function, peers=math.nan):
        found, _ = function({"a": torch.tensor([2.0, 5.0])}, torch.tensor([2, 1]), True)
    return bool(found["a"].isfinite())


# -- reduce_dict, of torchvision's references and the DETR family -----------------------------------------------------


def _takes_average(parameters: list[inspect.Parameter]) -> bool:
    return len(parameters) == 2 and parameters[0].default is inspect.Parameter.empty and parameters[1].default is True


def _probe_reduce_dict(function: Function, owner: type | None) -> str | None:
    for ranks, average in ((1, True), (2, True), (2, False)):
        with pretended_ranks(ranks, function):
            found = function({"b": torch.tensor(2.0), "a": torch.tensor(0.5)}, average)
        times = 1 if average else ranks
        expected = {"a": torch.tensor(0.5 * times), "b": torch.tensor(2.0 * times)}
        if not _is_same(found, expected):
            return _differs(ranks, found, expected)
    return None


def _reduce_dict(call: dict[str, Any]) -> dict[Any, Any]:
    given, average = call.values()
    leaves, weight = _spread(given), torch.ones(1, device="cpu")
    if not average:
        return _gathered_up(recursive_op.recursive_sum(leaves, weight, True))
    return _gathered_up(recursive_op.recursive_average(leaves, weight, True)[0])


_SHAPE = "ddpstats: a tensor of shape "


def _spread(given: Any) -> Any:
    """Tensors of more than one dimension as lists of their elements, since a leaf of a reduction is one number."""
    if not isinstance(given, Mapping):
        return given  # is refused on every rank
    return {
        key: {f"{_SHAPE}{'x'.join(map(str, value.shape))}": list(value.detach().flatten().unbind())}
        if isinstance(value, Tensor) and value.ndim and not value.is_sparse
        else value
        for key, value in given.items()
    }


def _gathered_up(reduced: Any) -> dict[Any, Any]:
    """`_spread` undone, with the keys in the order in which every copy has them: sorted."""
    found = {}
    for key in sorted(reduced):
        value = reduced[key]
        if isinstance(value, dict) and all(str(name).startswith(_SHAPE) for name in value):
            shapes = [name.removeprefix(_SHAPE) for name in value]
            if len(shapes) > 1:
                raise SchemaConflict(
                    f"reduce_dict: ranks hold tensors of shapes {' and '.join(sorted(shapes))} under {key!r}, which "
                    "cannot be averaged. Give the key one shape on all ranks, or use different keys.",
                    path=str(key),
                )
            value = torch.stack(value[_SHAPE + shapes[0]]).reshape([int(size) for size in shapes[0].split("x")])
        found[key] = value
    return found


# -- _parse_losses, of mmdetection 2 and what else stands on mmcv 1 ---------------------------------------------------


def _probe_parse_losses(function: Function, owner: type | None) -> str | None:
    for ranks in (1, 2):
        values = torch.tensor([2.0, 4.0, 1.0, 3.0], requires_grad=True)
        losses = {"loss_a": values[:2], "losses": [values[2], values[3]], "acc": torch.tensor([50.0])}
        with pretended_ranks(ranks, function):
            found = function(losses) if owner is None else function(None, losses)
        expected = (torch.tensor(7.0), {"loss_a": 3.0, "losses": 4.0, "acc": 50.0, "loss": 7.0})
        if not _is_same(found, expected):
            return _differs(ranks, found, expected)
        if not found[0].requires_grad:
            return "gives a loss without a gradient"
    return None


def _parse_losses(call: dict[str, Any]) -> tuple[Any, Any]:
    means = {name: _mean(value) for name, value in call["losses"].items()}
    loss = sum(value for name, value in means.items() if "loss" in name and isinstance(value, Tensor))
    averages = OrderedDict(reduce_stats({**means, "loss": loss}, name="_parse_losses").values)
    averages.move_to_end("loss")
    return loss, averages


def _mean(value: Any) -> Any:
    """What cannot be averaged stays as it is: the reduction refuses it, on every rank."""
    try:
        if isinstance(value, Tensor):
            return value.mean()
        return sum(one.mean() for one in value)
    except Exception:
        return value


# -- write_metrics, of detectron2's trainers --------------------------------------------------------------------------


def _probe_write_metrics(function: Function, owner: type | None) -> str | None:
    get_storage = inspect.unwrap(function).__globals__.get("get_event_storage")
    make_storage = getattr(sys.modules.get(getattr(get_storage, "__module__", "")), "EventStorage", None)
    if make_storage is None:
        return "has no get_event_storage and EventStorage of detectron2 beside it"
    call: dict[str, Any] = {"loss_dict": {"a": torch.tensor(0.5), "b": torch.tensor(2.0)}, "data_time": 0.25}
    if "cur_iter" in inspect.signature(function).parameters:
        call["cur_iter"] = 3
    call["prefix"] = "x_"
    with make_storage(3) as theirs, pretended_ranks(1, function):
        function(**call)
    with make_storage(3) as ours:
        _write(function, call, {"a": 0.5, "b": 2.0}, 2.5, 0.25, is_main=True)
    if theirs.latest() != ours.latest():
        return f"writes {theirs.latest()} where {ours.latest()} is expected"
    return None


def _write_metrics(original: Function, call: dict[str, Any]) -> None:
    stats = {"losses": call["loss_dict"], "data_time": Max(call["data_time"])}
    reduced = reduce_stats(stats, name="write_metrics")
    losses, weights = reduced.values.get("losses", {}), reduced.weights.get("losses", {})
    # What DDP trains on: the mean of the ranks' own totals. A key that only some have counts for those.
    total = sum(value * weights[key] for key, value in losses.items()) / reduced.total_weight
    _write(original, call, losses, total, reduced.values["data_time"], is_main=dist.get_rank() == 0)


def _write(
    original: Function, call: dict[str, Any], losses: dict[str, float], total: float, data_time: float, is_main: bool
) -> None:
    """Into this rank's storage what the copy would write there, if each rank held ``losses``."""
    storage = inspect.unwrap(original).__globals__["get_event_storage"]()
    at = {"cur_iter": call["cur_iter"]} if "cur_iter" in call else {}
    if at:
        storage.put_scalar("rank_data_time", call["data_time"], **at)
    if is_main:
        storage.put_scalar("data_time", data_time, **at)
    if not math.isfinite(total):
        iteration = at.get("cur_iter", storage.iter)
        raise FloatingPointError(f"Loss became infinite or NaN at iteration={iteration}!\nloss_dict = {losses}")
    if is_main:
        storage.put_scalar(f"{call['prefix']}total_loss", total, **at)
        if len(losses) > 1:
            storage.put_scalars(**at, **losses)


# -- MetricsTracker.reduce, of icefall --------------------------------------------------------------------------------


def _probe_tracker(function: Function, owner: type | None) -> str | None:
    if owner is None or not issubclass(owner, dict):
        return "is no method of a dict"
    for ranks in (1, 2):
        tracker: Any = owner()
        tracker.update(loss=1.5, frames=3)
        with pretended_ranks(ranks, function):
            found = function(tracker, torch.device("cpu"))
        expected = {"loss": 1.5 * ranks, "frames": 3.0 * ranks}
        if found is not None or not _is_same(dict(tracker), expected):
            return _differs(ranks, dict(tracker), expected)
    return None


def _reduce_tracker(call: dict[str, Any]) -> None:
    tracker = call["self"]
    sums = reduce_stats({key: Sum(value) for key, value in tracker.items()}, name="MetricsTracker.reduce").values
    tracker.update(sums or {})


# -- the table, and what probes have in common ------------------------------------------------------------------------


def _named(*legal: str) -> Callable[[list[inspect.Parameter]], bool]:
    """Whether parameters have just these names."""
    return lambda parameters: ", ".join(parameter.name for parameter in parameters) in legal


KNOWN = (
    Known(
        ("recursive_average",),
        "(obj, weight, distributed=False)",
        _takes_distributed,
        lambda function, owner: _probe_recursive(function, True),
        lambda original: _align_recursive(original, True),
    ),
    Known(
        ("recursive_sum",),
        "(obj, weight, distributed=False)",
        _takes_distributed,
        lambda function, owner: _probe_recursive(function, False),
        lambda original: _align_recursive(original, False),
    ),
    Known(
        ("reduce_dict",),
        "(input_dict, average=True)",
        _takes_average,
        _probe_reduce_dict,
        lambda original: _replacing(original, _reduce_dict),
    ),
    Known(
        ("_parse_losses",),
        "([self,] losses)",
        _named("losses", "self, losses"),
        _probe_parse_losses,
        lambda original: _replacing(original, _parse_losses),
    ),
    Known(
        ("write_metrics",),
        "(loss_dict, data_time[, cur_iter], prefix)",
        _named("loss_dict, data_time, prefix", "loss_dict, data_time, cur_iter, prefix"),
        _probe_write_metrics,
        lambda original: _replacing(original, functools.partial(_write_metrics, original)),
    ),
    Known(
        ("reduce",),
        "(self, device)",
        _named("self, device"),
        _probe_tracker,
        lambda original: _replacing(original, _reduce_tracker),
    ),
)


def _is_same(found: Any, expected: Any) -> bool:
    """Whether these are the same numbers, in tensors, dicts, lists and tuples of the same kinds."""
    if isinstance(expected, Tensor):
        return (
            isinstance(found, Tensor) and found.ndim == 0 and found.dtype == expected.dtype and bool(found == expected)
        )
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(_is_same(found[key], value) for key, value in expected.items())
        )
    if isinstance(expected, (list, tuple)):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(_is_same, found, expected))
    return not isinstance(found, Tensor) and bool(found == expected)


def _differs(ranks: int, found: Any, expected: Any) -> str:
    where = "one rank" if ranks == 1 else f"{ranks} ranks that hold the same"
    return f"gives {found} on {where}, where {expected} is expected"
