"""Where bit flips strike by hooks: one function per place, each called once with what is to be hooked.

In the forward pass: `in_weight`, `in_activation`. In the backward pass: `in_activation_gradient`, `in_gradient`. At its
end, after DistributedDataParallel's own: `in_reduced_gradient`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe.gradients import unwrapped
from ddpstats._observe.torch_compat import queue_callback
from ddpstats.errors import ConfigError
from ddpstats.testing._flip_fault import Fault


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
    """Also the parameter that takes its place under its name, from the next forward pass on."""
    hooked: list[Any] = []

    def before_forward(*_: Any) -> None:
        parameter = dict(module.named_parameters(remove_duplicate=False)).get(fault.flip.name)
        if parameter is not None and parameter.requires_grad and not any(parameter is one for one in hooked):
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
    places: Iterable[Any] = output.items() if isinstance(output, dict) else enumerate(output)
    for place, value in places:
        if _can_be_struck(value):
            return _replaced(output, place, change(value))
    return output


def _can_be_struck(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.layout is torch.strided and not value.is_nested and not value.is_meta


def _replaced(output: Any, place: Any, value: Tensor) -> Any:
    if isinstance(output, tuple):
        values = [*output[:place], value, *output[place + 1 :]]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    changed = copy.copy(output)
    changed[place] = value
    return changed


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, under each of their names."""
    found: dict[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    return found | dict(module.named_parameters(remove_duplicate=False))
