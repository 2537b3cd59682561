"""Modules: what goes in and comes out, their parameters, and these parameters' gradients.

1. A hook before each module's forward pass: its name, its inputs and its own parameters as they are then; it becomes
   the innermost parent.
2. A hook after it, which runs also if the forward pass raises: its outputs, and what is to be seen of the backward
   pass. Both are recorded by `RecordedCall`.
3. A hook on each parameter: the gradient of this backward pass, before it is accumulated or reduced. FSDP2's sharded
   parameters take no part in the graph; FSDP2 calls hooks that run after accumulation itself. So their gradient is what
   is in ``grad`` then: reduced, and accumulated.

No node is put into the graph, as ``register_full_backward_hook`` would: after that a program that changes an output in
place fails. Modules inside ``torch.compile`` and TorchScript are left alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpstats._observe.gradients import ModuleHook, unwrap
from ddpstats._observe.torch_compat import (
    compiled_call,
    gradient_hooks,
    in_backward,
    is_tracing,
    leave_no_hooks,
    without_compile,
)
from ddpstats.dump.msprobe import GRADIENTS, backward_of, forward_name, module_base
from ddpstats.dump.record.backward import PassEntries
from ddpstats.dump.record.calls import RecordedCall
from ddpstats.dump.record.recorder import OpenEntry, Recorder


@dataclass
class _ForwardPass:
    """A forward pass that has begun, while the program handles the error ``handled``, or none."""

    module: nn.Module
    call: RecordedCall
    handled: BaseException | None


class ModuleWatch:
    """Hooks on the modules of a model, from `start` to `stop`."""

    def __init__(self, recorder: Recorder, model: Any) -> None:
        self._recorder = recorder
        self._modules: dict[int, tuple[str, nn.Module]] = {}  # by id: a module need not have a hash
        self.has_compiled = sum(_find_modules(part, path, self._modules) for path, part in _parts_of(model)) > 0
        self._hooks = ExitStack()
        self._gradients: dict[int, ParameterGradients] = {}
        self._running: list[_ForwardPass] = []
        self._thread = threading.get_ident()

    def start(self) -> None:
        hooks = self._hooks
        try:
            for path, module in self._modules.values():
                base = module_base(path, type(without_compile(module)).__name__)
                before, after = _Hook(self, partial(self._forward_begins, base)), _Hook(self, self._forward_ends)
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after, with_kwargs=True, always_call=True))
                if self._recorder.wants_backward:
                    self._watch_parameters(module, base)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Idempotent."""
        self._hooks.close()
        self._gradients.clear()
        self._running.clear()

    forget = stop  # in a process that was forked from the one that records

    def is_seen(self) -> bool:
        """Return whether this thread is the one that started the dump, or one of autograd's."""
        if threading.get_ident() == self._thread:
            return True
        return in_backward() and isinstance(threading.current_thread(), threading._DummyThread)

    def _watch_parameters(self, module: nn.Module, base: str) -> None:
        own = nn.Module.named_parameters(module, recurse=False)
        wanting = [(name, each) for name, each in own if each.requires_grad and not is_lazy(each)]
        entry_name = f"{base}.{GRADIENTS}"
        gradients = ParameterGradients(recorder=self._recorder, name=entry_name, expected=len(wanting))
        self._gradients[id(module)] = gradients
        for name, parameter in wanting:
            if gradient_hooks(parameter) is None:
                self._hooks.callback(leave_no_hooks, parameter)
            handles = [parameter.register_hook(partial(self._gradient_arrives, gradients, name))]  # type: ignore[no-untyped-call]
            if hasattr(parameter, "placements"):
                hook = partial(self._gradient_accumulates, gradients, name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            for handle in handles:
                self._hooks.enter_context(handle)

    def _gradient_arrives(self, gradients: ParameterGradients, name: str, gradient: Tensor | None) -> None:
        gradients.in_graph.add(name)
        if self.is_seen():
            gradients.arrive(name, gradient)

    def _gradient_accumulates(self, gradients: ParameterGradients, name: str, parameter: Tensor) -> None:
        if name not in gradients.in_graph and self.is_seen():
            gradients.arrive(name, parameter.grad)

    # -- a forward pass -----------------------------------------------------------------------------------------------

    def _forward_begins(self, base: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        recorder, handled = self._recorder, sys.exc_info()[1]
        name = forward_name(base, recorder.next_number(base))
        call = RecordedCall(recorder, name, args, kwargs, dict(nn.Module.named_parameters(module, recurse=False)))
        self._running.append(_ForwardPass(module, call, handled))
        if id(module) in self._gradients:
            self._gradients[id(module)].inside = [*recorder.parents, name]
        recorder.parents.append(name)

    def _forward_ends(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        error = sys.exc_info()[1]
        if not any(running.module is module for running in self._running):
            return  # a hook of the program has raised before ours
        while (running := self._running.pop()).module is not module:
            pass  # left by an error
        del self._recorder.parents[len(self._running) :]
        if result is not None or error is None or error is running.handled:
            running.call.end(result)
        else:
            running.call.fail(error)


class _Hook(ModuleHook):
    """A hook before or after a module's forward pass."""

    def __init__(self, watch: ModuleWatch, act: Callable[..., None]) -> None:
        self._watch, self._act = watch, act

    def __call__(self, *seen: Any) -> None:
        if not is_tracing() and self._watch.is_seen():
            self._act(*seen)


def _parts_of(model: Any) -> list[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        return [("", model)]
    return [(str(key), part) for key, part in (model.items() if isinstance(model, dict) else enumerate(model))]


def _find_modules(module: nn.Module, path: str, modules: dict[int, tuple[str, nn.Module]]) -> bool:
    """Put modules into ``modules``, depth first, but those inside ``torch.compile``; return whether there are such."""
    is_compiled = without_compile(module) is not module
    module = module if is_compiled else unwrap(module)
    if id(module) in modules:
        return False
    if compiled_call(module) or isinstance(module, torch.jit.ScriptModule):
        return True
    modules[id(module)] = path, module
    if is_compiled:
        return True
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    return sum(_find_modules(child, name, modules) for name, child in children) > 0


@dataclass(kw_only=True, eq=False)
class ParameterGradients(PassEntries):
    """Gradients of one module's own parameters.

    Attributes:
        inside: names of the module's last forward pass and of those around it, innermost last.
        in_graph: names of the parameters whose hook has run.
    """

    inside: Sequence[str] = ()
    in_graph: set[str] = field(default_factory=set)

    def begin(self) -> OpenEntry:
        name = f"{self.name}.{self.recorder.next_number(self.name)}"
        entry = self.recorder.open(name, {}, [backward_of(parent) for parent in self.inside])
        entry.parents = ()
        return entry

    def fill(self, entry: OpenEntry, name: str, gradient: Any) -> None:
        entry.raw[name] = [self.recorder.leaves_of(entry.name).of(gradient, name)]
