"""One bit flip on this rank: what was asked for, when it is due, its deed, and the record of it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddpstats._observe.gradients import ModuleHook
from ddpstats._observe.torch_compat import stored_values
from ddpstats.errors import ConfigError

Where = Literal["weight", "activation", "activation_gradient", "gradient", "reduced_gradient", "matmul"]

_BITS: dict[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class BitFlip:
    """Flip one bit of one element of a named tensor at one step on one rank.

    Attributes:
        name: dotted name of a parameter (weight, which may also be a buffer, gradient, reduced_gradient) or of a module
            (activation, activation_gradient, matmul), as in the module inside DDP; "" is the whole model.
        where: which tensor; of a module that returns several, the first with floating-point numbers.
        element: flat index, taken modulo the number of elements.
        bit: 0 is the least significant.
        step: the first step is 0.
        rank: global; None means every rank.
        sticky: the bit is stuck from that step on, at the value it was flipped to; else it flips once.
    """

    name: str
    where: Where
    element: int
    bit: int
    step: int
    rank: int | None = None
    sticky: bool = False


@dataclass(frozen=True)
class AppliedFlip:
    """A flip that took place.

    Attributes:
        step, rank: when and where; ``rank`` is global.
        index: of the element in the tensor.
        before, after: its value; the same where a stuck bit already had its value.
    """

    flip: BitFlip
    step: int
    rank: int
    index: tuple[int, ...]
    before: float
    after: float


class FlipInjector:
    """What `inject_bit_flips` yields. Local.

    Attributes:
        applied: what was flipped, in order. A flip that found no occasion in its step is not here, nor one of a module
            that returned no floating-point tensor (in a tuple, list, dict, or by itself).
    """

    def __init__(self) -> None:
        self.applied: list[AppliedFlip] = []
        self._step = 0

    def step(self) -> None:
        """The training step is over: call it after ``optimizer.step()``."""
        self._step += 1


class Fault:
    """One flip on this rank: whether it is due, and its deed."""

    def __init__(self, flip: BitFlip, rank: int, injector: FlipInjector, hooks: contextlib.ExitStack) -> None:
        self.flip, self.rank, self.injector, self.hooks = flip, rank, injector, hooks
        self.is_over = False
        self._stuck_at: bool | None = None
        hooks.callback(self._end)

    def _end(self) -> None:
        self.is_over = True

    def keep(self, handle: Any) -> None:
        """Take a hook away at the end."""
        self.hooks.callback(handle.remove)

    def before_forward(self, module: nn.Module, act: Callable[..., Any], *, prepend: bool = False) -> None:
        """Call ``act`` before each forward pass of ``module``, until the end."""
        self.keep(module.register_forward_pre_hook(_FlipHook(module, act), prepend=prepend))

    def after_forward(self, module: nn.Module, act: Callable[..., Any], *, always: bool = False) -> None:
        """After each; what it returns takes the place of the output. ``always``: also after one that has raised."""
        self.keep(module.register_forward_hook(_FlipHook(module, act), always_call=always))

    def is_due(self) -> bool:
        step = self.injector._step
        if self.flip.sticky:
            return not self.is_over and step >= self.flip.step
        return not self.is_over and step == self.flip.step and self._stuck_at is None

    @torch.no_grad()
    def strike(self, tensor: Tensor) -> None:
        """Flip the bit in ``tensor`` itself, whatever its strides."""
        if tensor.layout is not torch.strided:
            tensor = stored_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()
        if tensor.numel() == 0:
            return
        check_bit(self.flip, tensor.dtype)
        index = _index(self.flip.element, tensor.shape)
        element = tensor.detach()[index]
        before = float(element.item())
        bits, mask = element.view(_BITS[tensor.dtype.itemsize]), _mask(self.flip.bit, tensor.dtype.itemsize)
        if self._stuck_at is None:
            self._stuck_at = not int(bits.item()) & mask
        bits.copy_(bits | mask if self._stuck_at else bits & ~mask)
        after = float(element.item())
        self.injector.applied.append(AppliedFlip(self.flip, self.injector._step, self.rank, index, before, after))

    def struck(self, tensor: Tensor) -> Tensor:
        """A copy with the bit flipped."""
        found = tensor.detach().clone()
        self.strike(found)
        return found


def _index(element: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        element, place = divmod(element, size)
        index.insert(0, place)
    return tuple(index)  # what is left of `element` counts whole tensors


def _mask(bit: int, itemsize: int) -> int:
    """As a number of the signed dtype of that size."""
    return -(1 << bit) if bit == 8 * itemsize - 1 else 1 << bit


class _FlipHook(ModuleHook):
    """Acts for ``module``, and for no other one."""

    def __init__(self, module: nn.Module, act: Callable[..., Any]) -> None:
        self._module, self._act = weakref.ref(module), act

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        return self._act(*args) if module is self._module() else None


def check_bit(flip: BitFlip, dtype: torch.dtype) -> None:
    """Raises `ConfigError` where numbers of ``dtype`` have no such bit."""
    if dtype.is_complex:
        raise ConfigError(f"{flip}: bits of complex numbers cannot be flipped")
    if flip.bit >= 8 * dtype.itemsize:
        raise ConfigError(f"{flip}: the bits of {dtype} are 0 to {8 * dtype.itemsize - 1}")
