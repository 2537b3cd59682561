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
or ends (`inject_bit_flips`). Gradients of a parameter that replaces another one inside the block have no faults.

Of a sparse gradient the values are flipped: ``element`` and `AppliedFlip.index` count in these. A copy of the model
made inside the block (``copy.deepcopy``, ``torch.save``) has no faults.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpstats._observe.gradients import ModuleHook, unwrap
from ddpstats._observe.torch_compat import Kernels, kernel_at, keys_of_device, queue_callback, stored_values, tree_map
from ddpstats.errors import ConfigError

Where = Literal["weight", "activation", "activation_gradient", "gradient", "reduced_gradient", "matmul"]

_BITS: dict[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


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
        sticky: the bit is stuck from that step on, at the value it was flipped to; otherwise it flips once.
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
    """The handle that `inject_bit_flips` yields. Local.

    Attributes:
        applied: what was flipped, in order. A flip that found no occasion in its step is not here, nor one of a module
            that returned no floating-point tensor (in a tuple, list, dict, or by itself).
    """

    def __init__(self) -> None:
        self.applied: list[AppliedFlip] = []
        self._step = 0
        self._is_over = False

    def step(self) -> None:
        """The training step is over: call it after ``optimizer.step()``."""
        self._step += 1


class Fault:
    """One flip: says whether it is due on this rank, and applies it. ``hooks`` takes its hooks away at the end."""

    def __init__(
        self, flip: BitFlip, rank: int, model: nn.Module, injector: FlipInjector, hooks: contextlib.ExitStack
    ) -> None:
        self.flip, self.rank, self.model, self.module = flip, rank, model, unwrap(model)
        self._injector, self._hooks = injector, hooks
        self._stuck_at: bool | None = None

    def keep(self, handle: Any) -> None:
        """Take a hook away at the end."""
        self._hooks.callback(handle.remove)

    def before_forward(self, module: nn.Module, act: Callable[..., Any], *, prepend: bool = False) -> None:
        """Call ``act`` before each forward pass of ``module``, until the end."""
        self.keep(module.register_forward_pre_hook(_FlipHook(module, act), prepend=prepend))

    def after_forward(self, module: nn.Module, act: Callable[..., Any], *, always: bool = False) -> None:
        """Call ``act`` after each; its result replaces the output. ``always``: also after one that has raised."""
        self.keep(module.register_forward_hook(_FlipHook(module, act), always_call=always))

    def is_due(self) -> bool:
        step, flip = self._injector._step, self.flip
        if self._injector._is_over or flip.rank not in (None, self.rank):
            return False
        return step >= flip.step if flip.sticky else step == flip.step and self._stuck_at is None

    def check_bit(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``. Raises `ConfigError` where its numbers have no such bit."""
        width = 8 * tensor.dtype.itemsize
        if tensor.dtype.is_complex or self.flip.bit >= width:
            raise ConfigError(f"{self.flip}: the bits of {tensor.dtype} are 0 to {width - 1}, unless it is complex")
        return tensor

    @torch.no_grad()
    def strike(self, tensor: Tensor) -> None:
        """Flip the bit in ``tensor`` itself, whatever its strides."""
        if tensor.layout is not torch.strided:
            tensor = stored_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()
        if tensor.numel() == 0:
            return
        flat_index = torch.tensor(self.flip.element % self.check_bit(tensor).numel())
        index = tuple(map(int, torch.unravel_index(flat_index, tensor.shape)))
        element = tensor.detach()[index]
        before = float(element.item())
        bits = element.view(_BITS[tensor.dtype.itemsize])
        mask = torch.ones_like(bits) << self.flip.bit
        if self._stuck_at is None:
            self._stuck_at = not int(bits & mask)
        bits.copy_(bits | mask if self._stuck_at else bits & ~mask)
        after = float(element.item())
        self._injector.applied.append(AppliedFlip(self.flip, self._injector._step, self.rank, index, before, after))

    def flip_copy(self, tensor: Tensor) -> Tensor:
        """Return a copy with the bit flipped, through which gradients pass as through ``tensor``."""
        copied = tensor.clone()
        self.strike(copied)
        return copied

    def strike_if_due(self, gradient: Tensor) -> Tensor | None:
        return self.flip_copy(gradient) if self.is_due() else None


class _FlipHook(ModuleHook):
    """Acts for ``module``, and for no other one."""

    def __init__(self, module: nn.Module, act: Callable[..., Any]) -> None:
        self._module, self._act = weakref.ref(module), act

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        return self._act(*args) if module is self._module() else None


def in_weight(fault: Fault) -> None:
    path, _, name = fault.flip.name.rpartition(".")

    def weight() -> Tensor:
        tensor: Tensor = getattr(fault.module.get_submodule(path), name).data
        return tensor

    def before_forward(*_: Any) -> None:
        if fault.is_due():
            fault.strike(weight())

    fault.check_bit(weight())
    fault.before_forward(fault.module, before_forward, prepend=True)


def in_activation(fault: Fault) -> None:
    def after_forward(inputs: Any, output: Any) -> Any:
        return _with_first_tensor(output, fault.flip_copy) if fault.is_due() else None

    fault.after_forward(fault.module.get_submodule(fault.flip.name), after_forward)


def in_activation_gradient(fault: Fault) -> None:
    def add_hook(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(fault.strike_if_due)  # type: ignore[no-untyped-call]  # goes with the graph
        return tensor

    def after_forward(inputs: Any, output: Any) -> None:
        if fault.is_due():
            _with_first_tensor(output, add_hook)

    fault.after_forward(fault.module.get_submodule(fault.flip.name), after_forward)


def in_gradient(fault: Fault) -> None:
    parameter: Any = fault.check_bit(fault.module.get_parameter(fault.flip.name))
    fault.keep(parameter.register_hook(fault.strike_if_due))


def in_reduced_gradient(fault: Fault) -> None:
    queue = queue_callback
    if queue is None:
        raise ConfigError(f"{fault.flip}: this torch does not say when a backward pass ends (torch 2.13 does)")

    def reduced(parameter: Tensor) -> None:
        if fault.is_due() and parameter.grad is not None:
            fault.strike(parameter.grad)

    def arrived(parameter: Tensor) -> None:
        if fault.is_due() and getattr(fault.model, "require_backward_grad_sync", True):
            # DDP asks for its end of the pass while this runs, or, with a static graph, at the first one. What is asked
            # for at that time comes after it.
            queue(lambda: queue(lambda: reduced(parameter)))

    parameter: Any = fault.check_bit(fault.module.get_parameter(fault.flip.name))
    fault.keep(parameter.register_post_accumulate_grad_hook(arrived))


def _with_first_tensor(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``output`` with its first floating-point tensor changed, at any depth of tuples, lists and dicts."""
    changed = False

    def change_first(leaf: Any) -> Any:
        nonlocal changed
        if changed or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_meta:
            return leaf
        changed = True
        return change(leaf)

    return tree_map(change_first, output)


def in_matmul(fault: Fault) -> None:
    """Flip a bit in the first product of this thread while the module runs, and in the same product when repeated."""
    if kernel_at is None:
        raise ConfigError(f"torch {torch.__version__} does not name its kernels: bits in products cannot be flipped")
    kernel_of, cpu = kernel_at, keys_of_device("cpu", False)
    running: list[Any] = []  # the thread in which the module runs, then the operands of its first product

    def kernel(op: str) -> Callable[..., Tensor]:
        compute = kernel_of(f"aten::{op}", "CPU").call_boxed

        def multiply(*args: Tensor, **kwargs: Any) -> Tensor:
            result: Tensor = compute(cpu, *args, **kwargs)
            if running and running[0] == threading.get_ident() and fault.is_due():
                operands = (op, *((operand.data_ptr(), operand.shape, operand.stride()) for operand in args))
                if len(running) == 1:
                    running.append(operands)
                if running[1] == operands:
                    fault.strike(result)
            return result

        return multiply

    def before_forward(*_: Any) -> None:
        running[:] = [threading.get_ident()]

    module = fault.module.get_submodule(fault.flip.name)
    fault.keep(Kernels("aten", "CPU", {op: kernel(op) for op in _PRODUCTS}, replaces=True))
    fault.before_forward(module, before_forward)
    fault.after_forward(module, lambda *_: running.clear(), always=True)


_ATTACH: dict[str, Callable[[Fault], None]] = {
    "weight": in_weight,
    "activation": in_activation,
    "activation_gradient": in_activation_gradient,
    "gradient": in_gradient,
    "reduced_gradient": in_reduced_gradient,
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
        ...     for batch in batches:  # on every rank
        ...         train(batch)
        ...         faults.step()
        >>> faults.applied  # on rank 2
        [AppliedFlip(flip=..., step=5, rank=2, index=(0, 7), before=0.0123, after=4.2e+36)]
    """
    injector, (rank, world_size) = FlipInjector(), _rank_and_world_size()
    with contextlib.ExitStack() as hooks:
        for flip in flips:
            _check_numbers(flip, world_size)
            try:
                _ATTACH[flip.where](Fault(flip, rank, model, injector, hooks))
            except (AttributeError, RuntimeError) as error:  # torch's, of a name that is not there or gets no gradient
                raise ConfigError(f"{flip}: {error}") from error
        try:
            yield injector
        finally:
            injector._is_over = True


def _rank_and_world_size() -> tuple[int, int | None]:
    """Return this process's rank and the number of ranks; rank 0, and None, without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, None


def _check_numbers(flip: BitFlip, world_size: int | None) -> None:
    if flip.where not in _ATTACH:
        raise ConfigError(f"{flip}: where must be one of {', '.join(_ATTACH)}")
    if min(flip.element, flip.bit, flip.step, flip.rank or 0) < 0:
        raise ConfigError(f"{flip}: element, bit, step and rank are whole numbers, 0 or more")
    if world_size is not None and flip.rank is not None and flip.rank >= world_size:
        raise ConfigError(f"{flip}: the ranks are 0 to {world_size - 1}")
