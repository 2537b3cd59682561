"""The places where the sentinel looks: gradients of activations, as they pass in the backward pass.

1. Modules are chosen once: norm layers, where the caller does not say; a model has few of them, and every gradient goes
   through one. Their order is that of ``named_modules``, and so the same on every rank.
2. A forward hook puts a hook on the first tensor of the module's output that wants a gradient.
3. In the backward pass that hook makes a value of the gradient, on its device, and keeps it; nobody waits for it. The
   gradient is left as it is, and parameters behind it have not got theirs yet: no collective has seen any of it.
4. `Checkpoints.take` hands the values out, by micro-batch.

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe.gradient_norms import held_values
from ddpstats._observe.gradients import ModuleHook
from ddpstats._rerun.record import walk
from ddpstats._rerun.run import is_rerun
from ddpstats.errors import ConfigError

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Values = list[tuple[int, Tensor]]

_NORMS = (
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_NORM_NAME = re.compile(r"norm([123]d)?$", re.IGNORECASE)  # models bring norms of their own
_SHOWN_NAMES = 8


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
        ConfigError: a part of ``selection`` fits no module, or there is none to look at.
    """

    def __init__(
        self, module: nn.Module, selection: Sequence[Selector] | None, value_of: Callable[[Tensor], Tensor]
    ) -> None:
        chosen, self.warnings = _default(module) if selection is None else (_selected(module, selection), ())
        self.names = list(chosen)
        self._value_of = value_of
        self._micro_batches: list[Values] = []
        self._elsewhere: Values | None = None
        self._collecting = True
        self.in_float16 = False
        self._active = True
        self._handles = [
            one.register_forward_hook(_CheckpointHook(self, index)) for index, one in enumerate(chosen.values())
        ]

    def begin(self) -> None:
        """A micro-batch begins: values go into a list of their own until `end`, which the same caller must call."""
        self._micro_batches.append([])
        self._collecting = True

    def end(self) -> None:
        """The micro-batch is over: what other backward passes bring is not of the step."""
        self._collecting = False

    def discard(self) -> None:
        """It has raised: what it brought is not of the step either."""
        self._collecting = False
        self._micro_batches.pop()

    def take(self) -> list[Values]:
        """The values since the last call: a list per `begin`, of (index of the name, 0-d value), as they came.

        Where nobody ever called `begin`, there is one list for all that came, if anything did.
        """
        taken, self._micro_batches = self._micro_batches, []
        return taken

    @contextlib.contextmanager
    def redirected(self) -> Iterator[Values]:
        """Inside, values go into the list that is given, and not to `take`: for a step that is run once more."""
        outer, self._elsewhere = self._elsewhere, []
        try:
            yield self._elsewhere
        finally:
            self._elsewhere = outer

    def close(self) -> None:
        """Take the hooks away; those that wait in a graph do nothing from now on. Idempotent."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._micro_batches = []

    def _arrived(self, index: int, gradient: Tensor) -> None:
        """Between two operators of the backward pass: every function called here is cold, and counts."""
        if torch.is_grad_enabled():  # a backward pass with create_graph=True records
            gradient = gradient.detach()
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            gradient = held_values(gradient)
        if not gradient.is_floating_point():
            return
        self.in_float16 |= gradient.dtype is torch.float16
        value = self._value_of(gradient)
        if not _has_memory(value):
            return
        if self._elsewhere is not None:
            self._elsewhere.append((index, value))
        elif self._collecting and not is_rerun():
            if not self._micro_batches:
                self._micro_batches.append([])
            self._micro_batches[-1].append((index, value))


class _CheckpointHook(ModuleHook):
    """Hooks the output of its module."""

    def __init__(self, checkpoints: Checkpoints, index: int) -> None:
        self._hook = _GradientHook(weakref.ref(checkpoints), index)  # the module must not keep them alive

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not self._hook.is_wanted():
            return
        tensor = output if type(output) is Tensor and output.requires_grad else _first_wanting_gradient(output)
        if tensor is not None and not tensor.is_leaf:  # a hook on a parameter would stay on it
            if self._hook.is_first:
                self._hook.note_autocast(tensor)
            tensor.register_hook(self._hook)  # type: ignore[no-untyped-call]


class _GradientHook:
    """Shows the gradient of one output to the checkpoints; must not keep them alive, because the graph may live on."""

    __torch_unserializable__ = True  # torch.save of an output does not warn that the hook is left out

    def __init__(self, checkpoints: weakref.ref[Checkpoints], index: int) -> None:
        self._checkpoints = checkpoints
        self._index = index
        self.is_first = index == 0

    def note_autocast(self, tensor: Tensor) -> None:
        kind, checkpoints = tensor.device.type, self._checkpoints()
        if checkpoints is not None and torch.is_autocast_enabled(kind):
            checkpoints.in_float16 |= torch.get_autocast_dtype(kind) is torch.float16

    def is_wanted(self) -> bool:
        checkpoints = self._checkpoints()
        return checkpoints is not None and checkpoints._active

    def __call__(self, gradient: Tensor | None) -> None:
        checkpoints = self._checkpoints()
        # There is none where only another output of the same operator was used.
        if gradient is not None and checkpoints is not None and checkpoints._active:
            checkpoints._arrived(self._index, gradient)


def _first_wanting_gradient(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.requires_grad else None
    leaves = (leaf for _, leaf in walk(output))
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad), None)


def _has_memory(value: Tensor) -> bool:
    """What is inside a transformation of ``torch.func`` has none, and means nothing outside of it."""
    try:
        value.data_ptr()
    except RuntimeError:
        return False
    return True


def _default(module: nn.Module) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Norm layers; else layers that have a matrix; else layers that have anything."""
    candidates = _candidates(module)
    norms = {name: one for name, one in candidates.items() if _is_norm(one)}
    if norms:
        return norms, ()
    leaves = {name: one for name, one in candidates.items() if _is_leaf(one)}
    for what, dimensions in (("with a weight of two or more dimensions", 2), ("with parameters", 0)):
        chosen = {
            name: one
            for name, one in leaves.items()
            if any(_dimensions(parameter) >= dimensions for parameter in one.parameters())
        }
        if chosen:
            kinds = Counter(type(one).__name__ for one in chosen.values())
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(_SHOWN_NAMES))
            return chosen, (
                f"the model has no norm layer: the gradients of the outputs of all {len(chosen)} layers {what} are "
                f"looked at instead ({counts}); checkpoints=[...] chooses others, by name, class or function",
            )
    raise ConfigError(
        "the model has neither a norm layer nor any other layer with parameters: no gradient can be looked at; "
        "checkpoints=[...] chooses modules by name, class or function"
    )


def _candidates(module: nn.Module) -> dict[str, nn.Module]:
    """Modules that are called with activations: neither containers, nor what makes a weight of other weights."""
    return {
        name: one
        for name, one in module.named_modules()
        if type(one).forward is not nn.Module.forward and "parametrizations" not in name.split(".")
    }


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or (_is_leaf(module) and _NORM_NAME.search(type(module).__name__) is not None)


def _is_leaf(module: nn.Module) -> bool:
    return all(name == "parametrizations" for name, _ in module.named_children())


def _dimensions(parameter: nn.Parameter) -> int:
    """A parameter whose shape is not known yet is one of a layer that makes a matrix of it, mostly."""
    return 2 if isinstance(parameter, nn.UninitializedParameter) else parameter.dim()


def _selected(module: nn.Module, selection: Any) -> dict[str, nn.Module]:
    if isinstance(selection, (str, type)) or not isinstance(selection, Sequence) or not selection:
        raise ConfigError(
            f"checkpoints={selection!r} is not understood; legal values: None for the norm layers, or a list of module "
            "names, module classes and functions of a name and a module"
        )
    modules: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    chosen = {id(match) for selector in selection for match in _matches(modules, selector)}
    return {name: child for name, child in module.named_modules() if id(child) in chosen}


def _matches(modules: Mapping[str, nn.Module], selector: Any) -> list[nn.Module]:
    if isinstance(selector, str):
        matches = [modules[selector]] if selector in modules else []
        if matches and type(matches[0]).forward is nn.Module.forward:
            kind = type(matches[0]).__name__
            raise ConfigError(f"checkpoints: {selector!r} is a {kind}, which is never called itself")
    elif isinstance(selector, type) and issubclass(selector, nn.Module):
        matches = [child for child in modules.values() if isinstance(child, selector)]
    elif callable(selector) and not isinstance(selector, (type, nn.Module)):
        matches = [child for name, child in modules.items() if selector(name, child)]
    else:
        raise ConfigError(f"checkpoints: {selector!r} is neither a name nor a module class nor a function")
    if not matches:
        shown = getattr(selector, "__qualname__", repr(selector))
        raise ConfigError(f"checkpoints: {shown} fits none of the model's {len(modules)} modules")
    return matches
