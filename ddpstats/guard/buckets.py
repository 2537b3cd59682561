"""Which parameters a bucket of gradients holds: for messages only, when something has gone wrong.

DDP's C++ reducer sums flat buffers, and nothing in the call says whose gradients are in them. It cannot be asked: while
a backward pass hangs it holds its lock. So the buckets are worked out anew from the models that use the group, with
the function that DDP itself divides parameters with: all in one bucket at first, then by size from the last to the
first. Where that leaves more than one possibility for a buffer of this size, or none, nothing is claimed.

Checked on torch 2.13.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ddpstats._base.text import shorten
from ddpstats._observe.groups import bucket_assignments
from ddpstats.guard.event import Event

_SHOWN_NAMES = 6


def with_parameters(events: Sequence[Event], label: str, group_name: str) -> Sequence[Event]:
    """``events``, those under ``label`` with the parameters whose gradients they hold, where that can be told."""
    if not any(event.label == label for event in events):
        return events
    try:
        buckets = [bucket for model in _models_on(group_name) for bucket in _buckets(model)]
    except (AttributeError, TypeError, ValueError, RuntimeError):  # a DDP of another torch
        return events
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
    yield "all parameters", sum(parameter.numel() for _, parameter in named)
    named.reverse()
    for groups in bucket_assignments([parameter for _, parameter in named], int(model.bucket_bytes_cap)):
        if len(groups) > 1:
            yield from _spelled(groups, named)


def _spelled(groups: Sequence[Sequence[int]], named: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, int]]:
    for number, indices in enumerate(groups):
        names = [named[index][0] for index in indices]
        yield (
            f"bucket {number} of {len(groups)}: {shorten(names, _SHOWN_NAMES)}",
            sum(named[index][1].numel() for index in indices),
        )
