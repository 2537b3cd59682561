"""A kept micro-batch as plain data: what a bundle holds of it, and what travels to a peer that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddpstats._base.containers import walk
from ddpstats._rerun.numerics_settings import Autocast
from ddpstats._rerun.step_record import MicroBatch


@dataclass(frozen=True)
class Packet:
    """What it takes to run a micro-batch again, but for the state of its module.

    Attributes:
        batch: as `serialize.to_plain` wrote it.
        random: as `RandomState.to_plain` wrote it.
        autocast: of the module's forward pass; None where it never began.
        factor: what the trainer multiplied the step's loss by; None for 1.
    """

    batch: Any
    random: dict[str, Any]
    autocast: Autocast | None
    factor: Tensor | None

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Packet:
        """What `plain_packet` made."""
        autocast = plain["autocast"]
        autocast = None if autocast is None else Autocast.from_plain(autocast)
        return cls(plain["batch"], plain["random"], autocast, plain["factor"])


def plain_packet(micro: MicroBatch, batch: Any, factor: Tensor | None) -> dict[str, Any]:
    """``batch``: of ``micro``, as `serialize.to_plain` writes it; ``factor``: on the CPU."""
    autocast = None if micro.autocast is None else Autocast(*micro.autocast).to_plain()  # a caller may set a tuple
    return {"batch": batch, "random": micro.random.to_plain(), "autocast": autocast, "factor": factor}


def tensor_bytes(value: Any) -> int:
    """Of the tensors in nested containers."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in walk(value) if isinstance(leaf, Tensor))
