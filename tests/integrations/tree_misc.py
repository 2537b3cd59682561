"""Reductions as people have them in their own trees: written for these tests, with the behaviour of the real ones.

torchvision's references and DETR (``reduce_dict``), mmdetection 2 (``_parse_losses``), detectron2 (``write_metrics``,
with its ``comm`` and its event storage), icefall (``MetricsTracker``); and functions that only look like these.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import all_reduce, get_world_size, is_initialized


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def reduce_dict(input_dict: dict[str, Tensor], average: bool = True) -> dict[str, Tensor]:
    if world_size() < 2:
        return input_dict
    names = sorted(input_dict)
    with torch.no_grad():
        stacked = torch.stack([input_dict[name] for name in names])
        dist.all_reduce(stacked)
        if average:
            stacked /= world_size()
    return dict(zip(names, stacked, strict=True))


def renamed(data: dict[str, Tensor], avg: bool = True) -> dict[str, Tensor]:
    """RT-DETR's and D-FINE's names of the parameters, and a name that nobody else has."""
    return reduce_dict(data, avg)


def to_main(input_dict: dict[str, Tensor], average: bool = True) -> dict[str, Tensor]:
    """As detectron2 has it: the result is on rank 0 alone, the others' values are whatever the backend left there."""
    names = sorted(input_dict)
    stacked = torch.stack([input_dict[name] for name in names])
    if world_size() > 1:
        dist.reduce(stacked, dst=0)
        if average and dist.get_rank() == 0:
            stacked /= world_size()
    return dict(zip(names, stacked, strict=True))


def by_name(input_dict: dict[str, Tensor], average: bool = True) -> dict[str, Tensor]:
    """As `reduce_dict`, with functions of torch.distributed that this module took by name."""
    reduced = {name: value.detach().clone() for name, value in input_dict.items()}
    if is_initialized():
        for value in reduced.values():
            all_reduce(value)
            value /= get_world_size() if average else 1
    return reduced


class Detector:
    def _parse_losses(self, losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
        means: dict[str, Tensor] = {}
        for name, value in losses.items():
            if not isinstance(value, (Tensor, list)):
                raise TypeError(f"{name} is neither a tensor nor a list of them")
            means[name] = (
                value.mean() if isinstance(value, Tensor) else torch.stack([one.mean() for one in value]).sum()
            )
        loss = torch.stack([value for name, value in means.items() if "loss" in name]).sum()
        if dist.is_initialized():
            count = torch.tensor(len(means))
            dist.all_reduce(count)
            assert count == len(means) * dist.get_world_size(), "the ranks have different log variables"
        log_vars = collections.OrderedDict[str, float]()
        for name, value in [*means.items(), ("loss", loss)]:
            value = value.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(value.div_(dist.get_world_size()))
            log_vars[name] = value.item()
        return loss, log_vars


class EventStorage:
    stack: ClassVar[list[EventStorage]] = []

    def __init__(self, start: int = 0) -> None:
        self.iter = start
        self.written: dict[str, tuple[float, int]] = {}

    def put_scalar(self, name: str, value: float, cur_iter: int | None = None) -> None:
        self.written[name] = (float(value), self.iter if cur_iter is None else cur_iter)

    def put_scalars(self, *, cur_iter: int | None = None, **values: float) -> None:
        for name, value in values.items():
            self.put_scalar(name, value, cur_iter)

    def latest(self) -> dict[str, tuple[float, int]]:
        return self.written

    def __enter__(self) -> EventStorage:
        self.stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.pop()


def get_event_storage() -> EventStorage:
    return EventStorage.stack[-1]


def gather_on_main(value: Any) -> list[Any]:
    if world_size() == 1:
        return [value]
    places: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, places)
    return places or []


def _write(losses: Mapping[str, Tensor], data_time: float, prefix: str, at: dict[str, int]) -> None:
    own = {name: value.item() for name, value in losses.items()}
    ranks = gather_on_main({**own, "data_time": data_time})
    if not ranks:
        return
    storage = get_event_storage()
    storage.put_scalar("data_time", max(rank.pop("data_time") for rank in ranks), **at)
    means = {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}
    total = sum(means.values())
    if not math.isfinite(total):
        raise FloatingPointError(f"the loss is {total}")
    storage.put_scalar(f"{prefix}total_loss", total, **at)
    if len(means) > 1:
        storage.put_scalars(**at, **means)


class Trainer:
    """detectron2's main branch, which takes the iteration and writes each rank's own time as well."""

    @staticmethod
    def write_metrics(loss_dict: Mapping[str, Tensor], data_time: float, cur_iter: int, prefix: str = "") -> None:
        get_event_storage().put_scalar("rank_data_time", data_time, cur_iter)
        _write(loss_dict, data_time, prefix, {"cur_iter": cur_iter})


class MetricsTracker(collections.defaultdict[str, float]):
    def __init__(self) -> None:
        super().__init__(int)

    def reduce(self, device: torch.device) -> None:
        names = sorted(self)
        sums = torch.tensor([float(self[name]) for name in names], device=device)
        dist.all_reduce(sums, op=dist.ReduceOp.SUM)
        self.update(zip(names, sums.tolist(), strict=True))


class Shared:
    """Has a ``reduce`` that is none of these."""

    def reduce(self, device: torch.device) -> None:
        raise AssertionError("nobody calls it")


# -- what only looks like these ---------------------------------------------------------------------------------------


class Lookalikes:
    @staticmethod
    def largest(input_dict: dict[str, Tensor], average: bool = True) -> dict[str, Tensor]:
        for value in input_dict.values():
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return input_dict

    @staticmethod
    def needs_a_gpu(input_dict: dict[str, Tensor], average: bool = True) -> dict[str, Tensor]:
        raise RuntimeError("no GPU here")

    @staticmethod
    def other_parameters(input_dict: dict[str, Tensor], size: int) -> dict[str, Tensor]:
        return input_dict

    @staticmethod
    def writes_another_name(loss_dict: Mapping[str, Tensor], data_time: float, prefix: str = "") -> None:
        get_event_storage().put_scalar("loss", 1.0)
