"""Faults of hardware to inject: one bit of one element of a named tensor, at one step, on one rank.

`inject_bit_flips` puts a hook at each place where a flip may fall due, and takes all of them away at its end:

========================  ==============================================================================================
weight                    before the forward pass, in the parameter (or buffer) itself
activation                what a module returns; the gradient passes back as if nothing had happened
activation_gradient       the gradient of what a module returned, in the backward pass
gradient                  this rank's own gradient of a parameter, before it is accumulated and reduced
reduced_gradient          ``.grad`` of a parameter after DDP has reduced it, at the end of the backward pass
matmul                    the result of the first matrix product in a module's forward pass, inside the operator
========================  ==============================================================================================

A transient flip falls due once in its step. A sticky one forces the bit to the value that the first flip gave it, at
each occasion from that step on; that of a matmul also when the same operands are multiplied once more.

Of matmuls those on the CPU are reached; no other thread may multiply matrices in the moment in which the block begins
or ends (`_flip_matmul`).

Of a sparse gradient the values are flipped: ``element`` and `AppliedFlip.index` count in these. A copy of the model
made inside the block (``copy.deepcopy``, ``torch.save``) has no faults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpstats._base.text import shorten
from ddpstats._observe.gradients import unwrapped
from ddpstats.errors import ConfigError
from ddpstats.testing import _flip_places as places
from ddpstats.testing._flip_fault import BitFlip, Fault, FlipInjector, Where, check_bit
from ddpstats.testing._flip_matmul import in_matmul

_IN_PARAMETERS = ("weight", "gradient", "reduced_gradient")
_SHOWN_NAMES = 8

_ATTACH: dict[str, Callable[[Fault, nn.Module], None]] = {
    "weight": places.in_weight,
    "activation": places.in_activation,
    "activation_gradient": places.in_activation_gradient,
    "gradient": places.in_gradient,
    "reduced_gradient": places.in_reduced_gradient,
    "matmul": in_matmul,
}


@contextlib.contextmanager
def inject_bit_flips(model: nn.Module, flips: Sequence[BitFlip]) -> Iterator[FlipInjector]:
    """Apply ``flips`` while the block trains ``model``. Local; each rank may be given all flips, and applies its own.

    Args:
        model: as it is trained: DistributedDataParallel itself, or a module.

    Raises:
        ConfigError: a name that the model does not have, or a number that cannot be; at once. A bit beyond the width of
            an activation's dtype is only seen when it is applied.

    Example:
        >>> with inject_bit_flips(model, [BitFlip("head.weight", "gradient", 7, bit=30, step=5, rank=2)]) as faults:
        ...     for batch in batches:  # rank 0 and rank 1 alike
        ...         train(batch)
        ...         faults.step()
        >>> faults.applied  # on rank 2
        [AppliedFlip(flip=..., step=5, rank=2, index=(0, 7), before=0.0123, after=4.2e+36)]
    """
    injector = FlipInjector()
    rank, world_size = _place()
    for flip in flips:
        _validate(flip, unwrapped(model), world_size)
    with contextlib.ExitStack() as hooks:
        for flip in flips:
            if flip.rank in (None, rank):
                _ATTACH[flip.where](Fault(flip, rank, injector, hooks), model)
        yield injector


def _place() -> tuple[int, int | None]:
    """This process's rank and the number of ranks; None where it is alone, and may be given the flips of others."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, None


def _validate(flip: BitFlip, module: nn.Module, world_size: int | None) -> None:
    if flip.where not in get_args(Where):
        raise ConfigError(f"{flip}: where must be one of {', '.join(get_args(Where))}")
    for what in ("element", "bit", "step", "rank"):
        value = getattr(flip, what)
        if not (what == "rank" and value is None) and (type(value) is not int or value < 0):
            raise ConfigError(f"{flip}: {what} must be a whole number, 0 or more")
    if world_size is not None and flip.rank is not None and flip.rank >= world_size:
        raise ConfigError(f"{flip}: the ranks are 0 to {world_size - 1}")
    if flip.where not in _IN_PARAMETERS:
        _named(flip, "module", dict(module.named_modules()))
        return
    parameters: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensor = _named(flip, "parameter", places.named_tensors(module) if flip.where == "weight" else parameters)
    _check_kind(flip, tensor)
    check_bit(flip, tensor.dtype)
    if flip.where != "weight" and not tensor.requires_grad:
        raise ConfigError(f"{flip}: this parameter is frozen and gets no gradient")


def _named(flip: BitFlip, kind: str, found: dict[str, Any]) -> Any:
    if flip.name not in found:
        names = shorten(map(repr, found), _SHOWN_NAMES)
        raise ConfigError(f"{flip}: there is no such {kind}; there are {names}")
    return found[flip.name]


def _check_kind(flip: BitFlip, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ConfigError(f"{flip}: this parameter is not initialized yet: run one forward pass before the block")
    if tensor.is_quantized or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        kinds = {"quantized": tensor.is_quantized, "on meta": tensor.is_meta, "nested": tensor.is_nested}
        what = next((kind for kind, holds in kinds.items() if holds), str(tensor.layout))
        raise ConfigError(f"{flip}: this tensor is {what} and has no bits to flip")
