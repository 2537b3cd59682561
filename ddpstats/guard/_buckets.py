"""Which parameters a bucket of gradients holds: for messages only, when something has gone wrong.

DDP's C++ reducer sums flat buffers, and nothing in the call says whose gradients are in them. The process's DDP models
can say it: `_get_ddp_logging_data` has the buckets' sizes and the parameters in each. That is asked of the models that
use the group in question, long after the call, so it costs a training step nothing; where sizes leave more than one
possibility, nothing is claimed.

Checked on torch 2.13; where the model's answer has another form, buckets stay without names.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ddpstats._events import Event

_SHOWN_NAMES = 6


def with_parameters(events: Sequence[Event], label: str, group_name: str) -> Sequence[Event]:
    """``events``, those under ``label`` with the parameters whose gradients they hold, where that can be told."""
    if not any(event.label == label for event in events):
        return events
    buckets = [bucket for model in _models_on(group_name) for bucket in _buckets(model)]
    return [_named(event, buckets) if event.label == label else event for event in events]


def _named(event: Event, buckets: Sequence[tuple[str, int]]) -> Event:
    shapes = event.signature.shapes
    if len(shapes) != 1 or len(shapes[0]) != 1 or event.pieces:
        return event
    fitting = {words for words, elements in buckets if elements == shapes[0][0]}
    return dataclasses.replace(event, pieces=fitting.pop()) if len(fitting) == 1 else event


def _models_on(group_name: str) -> Iterator[Any]:
    kind = torch.nn.parallel.DistributedDataParallel
    for found in gc.get_objects():
        if issubclass(type(found), kind) and getattr(found.process_group, "group_name", None) == group_name:
            yield found


def _buckets(model: Any) -> Iterator[tuple[str, int]]:
    """(words, number of elements) of each bucket that the model may reduce."""
    named = [(name, parameter) for name, parameter in model.module.named_parameters() if parameter.requires_grad]
    told = model._get_ddp_logging_data()
    yield "all parameters", sum(parameter.numel() for _, parameter in named)
    try:
        rebuilt = str(told.get("rebuilt_per_bucket_param_indices", ""))
        groups = [[int(index) for index in part.split()] for part in rebuilt.split(",") if part.strip()]
        for number, indices in enumerate(groups):
            names = [named[index][0] for index in indices]
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            words = f"bucket {number} of {len(groups)}: {', '.join(names[:_SHOWN_NAMES])}{more}"
            yield words, sum(named[index][1].numel() for index in indices)
    except (ValueError, IndexError):
        return
