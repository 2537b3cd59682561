"""What one rank's file holds, each field with its type: written by a stranger, perhaps.

The tensors are ordinary ones on the CPU, no larger than the file. Batches and random states stay as they were written;
`codec.from_plain` and `RandomState.from_plain` look at those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ddpstats._rerun.codec import checked_tensor
from ddpstats._rerun.record import Packet
from ddpstats._rerun.state import FLOAT_DTYPES, Autocast
from ddpstats.capture._fields import MOST_ENTRIES, MOST_RANKS, Fields
from ddpstats.errors import BundleError

_MOST_STEP = 10**18


@dataclass(frozen=True)
class CapturedMicroBatch(Packet):
    """One forward and backward pass.

    Attributes:
        batch_missing: why there is none, or None.
        changed: paths of what was changed in place after the batch was taken.
        loss: what was differentiated, without the scale.
        norms: of the gradients accumulated so far, in the order of `RankPart.parameter_names`, -1 where there is none;
            None if no backward pass ran.
    """

    batch_missing: str | None
    changed: list[str]
    loss: torch.Tensor | None
    norms: torch.Tensor | None


@dataclass(frozen=True)
class RankPart:
    """One rank's step.

    Attributes:
        rank: its global number, which may be any: the group need not hold all ranks of the job.
        world_size: how many ranks the group has.
    """

    rank: int
    world_size: int
    step: int
    device: str
    micro_batches: tuple[CapturedMicroBatch, ...]
    buffers: dict[str, torch.Tensor]
    eval_modules: list[str]
    frozen: list[str]
    norm: str
    gradients: dict[str, torch.Tensor] | None
    parameter_names: list[str]
    scale: float
    error: str | None
    environment: dict[str, str | bool | int]

    @classmethod
    def from_content(cls, content: Any, where: str) -> RankPart:
        """Raises `BundleError` that names ``where``, the file, and the field."""
        fields = Fields(content, where)
        names = fields.texts("parameter_names")
        return cls(
            rank=fields.integer("rank", 0, MOST_RANKS - 1),
            world_size=fields.integer("world_size", 1, MOST_RANKS),
            step=fields.integer("step", 0, _MOST_STEP),
            device=_device(fields),
            micro_batches=_micro_batches(fields, len(names)),
            buffers=tensors(fields, "buffers"),
            eval_modules=fields.texts("eval_modules"),
            frozen=fields.texts("frozen"),
            norm=fields.one_of("norm", ("2", "inf")),
            gradients=None if fields.raw("gradients") is None else tensors(fields, "gradients"),
            parameter_names=names,
            scale=fields.number("scale"),
            error=fields.text_or_none("error"),
            environment=_environment(fields),
        )


def tensors(fields: Fields, name: str) -> dict[str, torch.Tensor]:
    """Names and ordinary tensors."""
    at = fields.at(name)
    return {key: checked_tensor(value, f"{at}: {key[:80]}") for key, value in fields.mapping(name).items()}


def _device(fields: Fields) -> str:
    name = fields.text("device")
    try:
        return str(torch.device(name))
    except RuntimeError:
        raise fields.wrong("device", "a device") from None


def _micro_batches(fields: Fields, parameters: int) -> tuple[CapturedMicroBatch, ...]:
    given = fields.raw("micro_batches")
    if type(given) is not list or len(given) > MOST_ENTRIES:
        raise fields.wrong("micro_batches", "a list of micro-batches")
    return tuple(
        _micro_batch(Fields(one, f"{fields.at('micro_batches')}[{place}]"), parameters)
        for place, one in enumerate(given)
    )


def _micro_batch(fields: Fields, parameters: int) -> CapturedMicroBatch:
    norms = _tensor_or_none(fields, "norms")
    if norms is not None and (norms.dtype is not torch.float64 or norms.shape != (parameters,)):
        raise fields.wrong("norms", f"{parameters} norms in float64, one per parameter")
    return CapturedMicroBatch(
        batch=fields.raw("batch"),
        batch_missing=fields.text_or_none("batch_missing"),
        changed=fields.texts("changed"),
        random=dict(fields.mapping("random")),
        autocast=_autocast(fields),
        loss=_tensor_or_none(fields, "loss"),
        factor=_tensor_or_none(fields, "factor"),
        norms=norms,
    )


def _tensor_or_none(fields: Fields, name: str) -> torch.Tensor | None:
    value = fields.raw(name)
    return None if value is None else checked_tensor(value, fields.at(name))


def _autocast(fields: Fields) -> Autocast | None:
    if fields.raw("autocast") is None:
        return None
    inner = Fields(fields.raw("autocast"), fields.at("autocast"))
    dtype = FLOAT_DTYPES[inner.one_of("dtype", FLOAT_DTYPES)]
    return Autocast(inner.one_of("device_type", ("cpu", "cuda", "xpu", "mps")), inner.flag("enabled"), dtype)


def _environment(fields: Fields) -> dict[str, str | bool | int]:
    found = dict(fields.mapping("environment"))
    if not all(type(value) in (str, bool, int) for value in found.values()):
        raise fields.wrong("environment", "texts, numbers and flags by name")
    return found


def model_content(content: Any, where: str) -> dict[str, Any]:
    """The model's file: ``parameters`` are looked at here; the rest stays as it was written.

    Raises `BundleError`.
    """
    fields = Fields(content, where)
    fields.texts("left_out")
    for name in ("optimizer", "scheduler", "scaler"):
        fields.raw(name)
    try:
        return {**content, "parameters": tensors(fields, "parameters")}
    except RecursionError:
        raise BundleError(f"{where}: nested too deeply; the bundle is damaged or hostile") from None
