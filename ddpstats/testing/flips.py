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
or ends (`inject_bit_flips`).

Of a sparse gradient the values are flipped: ``element`` and `AppliedFlip.index` count in these. A copy of the model
made inside the block (``copy.deepcopy``, ``torch.save``) has no faults.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpstats._base.text import shorten
from ddpstats._observe.gradients import ModuleHook, unwrapped
from ddpstats._observe.torch_compat import Kernels, kernel_at, keys_of_device, queue_callback, stored_values
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
    """The handle that `inject_bit_flips` yields. Local.

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
        """Call ``act`` after each; its result replaces the output. ``always``: also after one that has raised."""
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
        copied = tensor.detach().clone()
        self.strike(copied)
        return copied


def _index(element: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        element, at = divmod(element, size)
        index.insert(0, at)
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


def in_weight(fault: Fault, model: nn.Module) -> None:
    module = unwrapped(model)

    def before_forward(*_: Any) -> None:
        weight = named_tensors(module).get(fault.flip.name) if fault.is_due() else None
        if weight is not None:
            fault.strike(weight.data)

    fault.before_forward(module, before_forward, prepend=True)


def in_activation(fault: Fault, model: nn.Module) -> None:
    def after_forward(inputs: Any, output: Any) -> Any:
        if fault.is_due():
            return _with_first_tensor(output, lambda tensor: _Struck.apply(tensor, fault))  # type: ignore[no-untyped-call]
        return None

    module = unwrapped(model).get_submodule(fault.flip.name)
    fault.after_forward(module, after_forward)


class _Struck(torch.autograd.Function):
    """Flips a bit forward, and nothing backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, fault: Fault) -> Tensor:
        return fault.struck(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def in_activation_gradient(fault: Fault, model: nn.Module) -> None:
    def arrived(gradient: Tensor) -> Tensor | None:
        return fault.struck(gradient) if fault.is_due() else None

    def hooked(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(arrived)  # type: ignore[no-untyped-call]  # goes with the graph
        return tensor

    def after_forward(inputs: Any, output: Any) -> None:
        if fault.is_due():
            _with_first_tensor(output, hooked)

    module = unwrapped(model).get_submodule(fault.flip.name)
    fault.after_forward(module, after_forward)


def in_gradient(fault: Fault, model: nn.Module) -> None:
    def arrived(gradient: Tensor) -> Tensor | None:
        return fault.struck(gradient) if fault.is_due() else None

    _hook_parameter(fault, unwrapped(model), lambda parameter: parameter.register_hook(arrived))


def in_reduced_gradient(fault: Fault, model: nn.Module) -> None:
    queue = queue_callback
    if queue is None:
        raise ConfigError(f"{fault.flip}: this torch does not say when a backward pass ends (torch 2.13 does)")

    def reduced(parameter: Tensor) -> None:
        if fault.is_due() and parameter.grad is not None:
            fault.strike(parameter.grad)

    def arrived(parameter: Tensor) -> None:
        if fault.is_due() and getattr(model, "require_backward_grad_sync", True):
            # DDP asks for its end of the pass while this runs, or, with a static graph, at the first one. What is asked
            # for at that time comes after it.
            queue(lambda: queue(lambda: reduced(parameter)))

    _hook_parameter(fault, unwrapped(model), lambda parameter: parameter.register_post_accumulate_grad_hook(arrived))


def _hook_parameter(fault: Fault, module: nn.Module, hook: Callable[[Any], Any]) -> None:
    """Hook the parameter of the flip; one that replaces it under its name is hooked at the next forward pass."""
    hooked: list[Any] = []

    def before_forward(*_: Any) -> None:
        parameter = dict(module.named_parameters(remove_duplicate=False)).get(fault.flip.name)
        if parameter is not None and parameter.requires_grad and not any(parameter is known for known in hooked):
            hooked.append(parameter)
            fault.keep(hook(parameter))

    before_forward()
    fault.before_forward(module, before_forward)


def _with_first_tensor(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``output`` with its first floating-point tensor changed; a module may return tuples, lists and dicts of them."""
    if _can_be_struck(output):
        return change(output)
    if not isinstance(output, (dict, list, tuple)):
        return output
    items: Iterable[Any] = output.items() if isinstance(output, dict) else enumerate(output)
    for key, value in items:
        if _can_be_struck(value):
            return _replaced(output, key, change(value))
    return output


def _can_be_struck(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.layout is torch.strided and not value.is_nested and not value.is_meta


def _replaced(output: Any, key: Any, value: Tensor) -> Any:
    if isinstance(output, tuple):
        values = [*output[:key], value, *output[key + 1 :]]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    changed = copy.copy(output)
    changed[key] = value
    return changed


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, under each of their names."""
    buffers: dict[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    return buffers | dict(module.named_parameters(remove_duplicate=False))


def in_matmul(fault: Fault, model: nn.Module) -> None:
    running: list[_Target] = []

    def before_forward(*_: Any) -> None:
        if fault.is_due():
            running.append(_Target(fault))
            _targets.append(running[-1])

    def after_forward(*_: Any) -> None:
        while running:
            _targets.remove(running.pop())

    _begin()
    fault.hooks.callback(_end)
    module = unwrapped(model).get_submodule(fault.flip.name)
    fault.before_forward(module, before_forward)
    fault.after_forward(module, after_forward, always=True)
    fault.hooks.callback(after_forward)


class _Target:
    """The first product of this thread from now on, and the same product each time it is repeated."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._thread = threading.get_ident()
        self._first: Any = None

    def is_hit(self, operands: Any) -> bool:
        if threading.get_ident() != self._thread or not self.fault.is_due():
            return False
        if self._first is None:
            self._first = operands
        return bool(self._first == operands)


_OPS = ("mm", "addmm", "bmm", "baddbmm")
_targets: list[_Target] = []  # of modules that run
_users = 0
_kernels: Kernels | None = None


def _begin() -> None:
    global _users, _kernels
    if _kernels is None:
        _kernels = Kernels("aten", "CPU", {op: _kernel(op) for op in _OPS}, replaces=True)
    _users += 1


def _end() -> None:
    global _users, _kernels
    _users -= 1
    if not _users and _kernels is not None:
        _kernels.remove()
        _kernels = None


def _kernel(op: str) -> Callable[..., Tensor]:
    if kernel_at is None:
        raise ConfigError(f"torch {torch.__version__} does not tell its kernels: bits in products cannot be flipped")
    compute = kernel_at(f"aten::{op}", "CPU").call_boxed
    cpu = keys_of_device("cpu", False)

    def kernel(*args: Tensor, **kwargs: Any) -> Tensor:
        result: Tensor = compute(cpu, *args, **kwargs)
        if _targets:
            operands = (op, *((operand.data_ptr(), operand.shape, operand.stride()) for operand in args))
            for target in list(_targets):
                if target.is_hit(operands):
                    target.fault.strike(result)
        return result

    return kernel


_IN_PARAMETERS = ("weight", "gradient", "reduced_gradient")
_SHOWN_NAMES = 8

_ATTACH: dict[str, Callable[[Fault, nn.Module], None]] = {
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
    injector = FlipInjector()
    rank, world_size = _rank_and_world_size()
    for flip in flips:
        _validate(flip, unwrapped(model), world_size)
    with contextlib.ExitStack() as hooks:
        for flip in flips:
            if flip.rank in (None, rank):
                _ATTACH[flip.where](Fault(flip, rank, injector, hooks), model)
        yield injector


def _rank_and_world_size() -> tuple[int, int | None]:
    """Return this process's rank and the number of ranks; rank 0, and None, without a process group."""
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
    tensor = _named(flip, "parameter", named_tensors(module) if flip.where == "weight" else parameters)
    check_bit(flip, tensor.dtype)
    if flip.where != "weight" and not tensor.requires_grad:
        raise ConfigError(f"{flip}: this parameter is frozen and gets no gradient")


def _named(flip: BitFlip, kind: str, found: dict[str, Any]) -> Any:
    if flip.name not in found:
        names = shorten(map(repr, found), _SHOWN_NAMES)
        raise ConfigError(f"{flip}: there is no such {kind}; there are {names}")
    return found[flip.name]
