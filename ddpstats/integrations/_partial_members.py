"""Members of a metric collection that only some ranks have: what they give is in the result of every rank.

What travels is the result, as tensors and plain values. The metric itself does not: no class is looked up because
another rank named it, so a rank never runs code that its own program did not bring, and metrics of the user's own are
served like the library's.

1. All ranks know from the states that they gathered who has which member.
2. Where each member is on every rank, that is all.
3. Else the first rank that has a member computes it, and one more gather brings its result to the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch


def senders(holders: Mapping[str, Collection[int]], size: int) -> dict[str, int]:
    """Member -> the rank that sends its result, for those that not all ``size`` ranks of a group have. Alike on all."""
    return {name: min(ranks) for name, ranks in holders.items() if len(ranks) < size}


def on_device(result: Any, device: torch.device) -> Any:
    """A result that came from another rank, with its tensors on ``device``."""
    if isinstance(result, torch.Tensor):
        return result.to(device)
    if isinstance(result, dict):
        return {key: on_device(value, device) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result)(on_device(value, device) for value in result)
    return result
