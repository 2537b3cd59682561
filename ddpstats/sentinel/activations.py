"""Layer 1 samples gradients of activations at checkpoints, as they pass in the backward pass.

1. Modules are chosen once: norm layers, where the caller does not say; a model has few of them, and every gradient goes
   through one. Their order is that of ``named_modules``, and so the same on every rank.
2. A forward hook puts a hook on the first tensor of the module's output that wants a gradient.
3. In the backward pass that hook makes a value of the gradient, on its device, and keeps it; no thread waits for it.
   The gradient is left as it is, and parameters behind it do not have theirs yet: no collective has seen any of it.
4. `Checkpoints.take` returns the values, by micro-batch.

A full backward hook of a module would see the same gradients. But it puts a view around the output, and a program that
then changes this in place, as in ``x = norm(x); x += y``, fails. A hook on a tensor stays with the value that the
tensor had when it was hooked. Activation checkpointing runs modules twice and differentiates one of the two outputs, so
values arrive once. A module that is called twice in one forward pass has two values.

Inside ``torch.compile`` there are no outputs to hook: such a module gives no values.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe.gradient_norms import held_values
from ddpstats._observe.gradients import ModuleHook
from ddpstats._rerun.record import walk
from ddpstats._rerun.run import is_rerun
from ddpstats.errors import ConfigError

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]
NumberedTensors = list[tuple[int, Tensor]]

_NORM_NAME = re.compile(r"norm([123]d)?$", re.IGNORECASE)  # of torch's norm layers, and of those that models bring


class Checkpoints:
    """Values of activation gradients, on this rank. Local.

    Args:
        module: inside any DistributedDataParallel.
        selection: which modules: names, classes, or functions of name and module; None: its norm layers.
        value_of: makes a 0-d tensor of a gradient; runs in the backward pass, without recording a graph.

    Attributes:
        names: of the modules, in the order of ``named_modules``; values refer to them by index.
        warnings: texts for the user.
        in_float16: a gradient was float16, or a forward pass ran under autocast to it, in which norm layers, which run
            in float32, do not show that gradients may be scaled.

    Raises:
        ConfigError: ``selection`` is empty, or an entry of it fits no module.
    """

    def __init__(
        self, module: nn.Module, selection: Sequence[Selector] | None, value_of: Callable[[Tensor], Tensor]
    ) -> None:
        chosen, self.warnings = _default(module) if selection is None else (_select(module, selection), ())
        self.names = list(chosen)
        self.in_float16 = False
        self._value_of = value_of
        self._micro_batches: list[NumberedTensors] = []
        self._rerun_values: NumberedTensors | None = None
        self._is_collecting = True
        self._handles = [
            child.register_forward_hook(_CheckpointHook(self, index)) for index, child in enumerate(chosen.values())
        ]

    @property
    def is_open(self) -> bool:
        """Return whether `close` was not called yet."""
        return bool(self._handles)

    def begin(self) -> None:
        """Begin a micro-batch: values go into a list of their own until `end`, which the same caller must call."""
        self._micro_batches.append([])
        self._is_collecting = True

    def end(self, failed: bool) -> None:
        """End the micro-batch: no other backward pass counts. If it ``failed``, it does not count either."""
        self._is_collecting = False
        if failed:
            self._micro_batches.pop()

    def take(self) -> list[NumberedTensors]:
        """Return the values since the last call: a list per `begin`, of (index of the name, 0-d value), as they came.

        In a program that never calls `begin`, there is one list for all that came, if anything did.
        """
        taken, self._micro_batches = self._micro_batches, []
        return taken

    @contextlib.contextmanager
    def redirect(self) -> Iterator[NumberedTensors]:
        """Put values into the list that is yielded, and not into that of `take`: for a step that is run again."""
        self._rerun_values = []
        try:
            yield self._rerun_values
        finally:
            self._rerun_values = None

    def close(self) -> None:
        """Take the hooks away; those that wait in a graph do nothing from now on. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._micro_batches = [], []

    def _keep_gradient(self, index: int, gradient: Tensor) -> None:
        """Keep a gradient's value. Between two operators of the backward pass every call here is cold, and counts."""
        if torch.is_grad_enabled():  # a backward pass with create_graph=True records
            gradient = gradient.detach()
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            gradient = held_values(gradient)
        if not gradient.is_floating_point():
            return
        self.in_float16 |= gradient.dtype is torch.float16
        value = self._value_of(gradient)
        try:
            value.data_ptr()
        except RuntimeError:  # inside a transformation of torch.func; it has no meaning outside
            return
        if self._rerun_values is not None:
            self._rerun_values.append((index, value))
        elif self._is_collecting and not is_rerun():
            if not self._micro_batches:
                self._micro_batches.append([])
            self._micro_batches[-1].append((index, value))


class _CheckpointHook(ModuleHook):
    """Hooks the output of its module."""

    def __init__(self, checkpoints: Checkpoints, index: int) -> None:
        self._hook = _GradientHook(weakref.ref(checkpoints), index)  # the module must not keep them alive

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        checkpoints, tensor = self._hook.checkpoints(), _find_differentiable(output)
        if checkpoints is None or tensor is None or tensor.is_leaf:  # a hook on a parameter would stay on it
            return
        kind = tensor.device.type
        if torch.is_autocast_enabled(kind):
            checkpoints.in_float16 |= torch.get_autocast_dtype(kind) is torch.float16
        tensor.register_hook(self._hook)  # type: ignore[no-untyped-call]


class _GradientHook:
    """Shows the gradient of one output to the checkpoints; must not keep them alive, because the graph may live on."""

    __torch_unserializable__ = True  # torch.save of an output does not warn that the hook is left out

    def __init__(self, checkpoints: weakref.ref[Checkpoints], index: int) -> None:
        self.checkpoints, self.index = checkpoints, index

    def __call__(self, gradient: Tensor | None) -> None:
        checkpoints = self.checkpoints()
        # It is None where only another output of the same operator was used.
        if gradient is not None and checkpoints is not None and checkpoints.is_open:
            checkpoints._keep_gradient(self.index, gradient)


def _find_differentiable(output: Any) -> Tensor | None:
    leaves = [output] if isinstance(output, Tensor) else (leaf for _, leaf in walk(output))
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad), None)


def _default(module: nn.Module) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Return the norm layers; of a model without any the layers that have a matrix, with a warning."""
    leaves = [child for child in _find_called(module).values() if _is_leaf(child)]
    norms = [child for child in leaves if _is_norm(child)]
    if norms:
        return _name_modules(module, norms), ()
    with_matrix = _name_modules(module, [child for child in leaves if any(map(_is_matrix, child.parameters()))])
    return with_matrix, (
        f"the model has no norm layer: the gradients of the outputs of all {len(with_matrix)} layers with a weight "
        "matrix are looked at instead; checkpoints=[...] chooses others, by name, class or function",
    )


def _find_called(module: nn.Module) -> dict[str, nn.Module]:
    """Return modules that are called with activations: neither containers, nor what makes a weight of other weights.

    A shared module has all of its names.
    """
    return {
        name: child
        for name, child in module.named_modules(remove_duplicate=False)
        if type(child).forward is not nn.Module.forward and "parametrizations" not in name.split(".")
    }


def _name_modules(module: nn.Module, children: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return each of some modules under its first name, in the order of ``named_modules``."""
    chosen = set(map(id, children))
    return {name: child for name, child in module.named_modules() if id(child) in chosen}


def _is_leaf(module: nn.Module) -> bool:
    return all(name == "parametrizations" for name, _ in module.named_children())


def _is_norm(module: nn.Module) -> bool:
    return any(_NORM_NAME.search(kind.__name__) for kind in type(module).__mro__)


def _is_matrix(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, nn.UninitializedParameter) or parameter.dim() >= 2  # a lazy layer makes one, mostly


def _select(module: nn.Module, selection: Any) -> dict[str, nn.Module]:
    if isinstance(selection, str) or not isinstance(selection, Sequence) or not selection:
        raise ConfigError(
            f"checkpoints={selection!r} is not understood; legal values: None for the norm layers, or a list of module "
            "names, module classes and functions of a name and a module"
        )
    modules, chosen = _find_called(module), list[nn.Module]()
    for selector in selection:
        matches = [child for name, child in modules.items() if _fits(selector, name, child)]
        if not matches:
            shown = getattr(selector, "__qualname__", repr(selector))
            raise ConfigError(f"checkpoints: {shown} fits none of the model's {len(modules)} modules that are called")
        chosen += matches
    return _name_modules(module, chosen)


def _fits(selector: Any, name: str, module: nn.Module) -> bool:
    if isinstance(selector, str):
        return name == selector
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return isinstance(module, selector)
    if not callable(selector) or isinstance(selector, (type, nn.Module)):
        raise ConfigError(f"checkpoints: {selector!r} is neither a name nor a module class nor a function")
    return bool(selector(name, module))
