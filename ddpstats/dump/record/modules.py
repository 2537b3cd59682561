"""Modules: what goes in and comes out, their parameters, and these parameters' gradients.

1. A hook before each module's forward pass: its name, its inputs and its own parameters as they are then; it becomes
   the innermost parent.
2. A hook after it, which runs also if the forward pass raises: its outputs, and what is to be seen of the backward
   pass. Of both sees `ForwardPass`.
3. A hook on each parameter: the gradient of this backward pass, before it is accumulated or reduced. FSDP2's sharded
   parameters take no part in the graph, and their hooks do not run: of these, what is in ``grad`` when the backward
   pass has ended, where that is new: it is reduced, and accumulated.

No node is put into the graph, as ``register_full_backward_hook`` would: after that a program that changes an output in
place fails. Modules inside ``torch.compile`` and TorchScript are left alone.

A forward pass that is left by what is no ``Exception`` (KeyboardInterrupt) says nothing: it is forgotten when the
module around it ends, or the model is called again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe.gradients import ModuleHook, unwrapped
from ddpstats._observe.torch_compat import (
    compiled_call,
    gradient_hooks,
    graph_task,
    in_backward,
    is_tracing,
    leave_no_hooks,
    no_dispatch_no_grad,
    queue_callback,
    shard_version,
    without_compile,
)
from ddpstats.dump.msprobe import module_base
from ddpstats.dump.record.forward import ForwardPass
from ddpstats.dump.record.recorder import OpenEntry, Recorder


class ModuleWatch:
    """Hooks on the modules of a model, from `start` to `stop`."""

    def __init__(self, recorder: Recorder, model: Any) -> None:
        self._recorder = recorder
        self._modules, self.has_compiled = _modules_of(model)
        self._hooks = ExitStack()
        self._gradients: dict[int, ParameterGradients] = {}  # by id: a module need not have a hash
        self._running: list[_RunningModule] = []
        self._thread = threading.get_ident()

    def start(self) -> None:
        hooks = self._hooks
        try:
            for path, module in self._modules:
                base = module_base(path, type(without_compile(module)).__name__)
                before, after = _Hook(self, partial(self.forward_begins, base)), _Hook(self, self.forward_ends)
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after, with_kwargs=True, always_call=True))
                if self._recorder.wants_backward:
                    self._watch_parameters(module, base)
            if any(one.sharded for one in self._gradients.values()):
                self._recorder.on_backward = self._backward_runs
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Idempotent."""
        self._hooks.close()
        self._recorder.on_backward = None
        self._gradients.clear()
        self._running.clear()

    forget = stop  # in a process that was forked from the one that collects

    def _watch_parameters(self, module: nn.Module, base: str) -> None:
        wanting = {name: one for name, one in module.named_parameters(recurse=False) if one.requires_grad}
        gradients = self._gradients[id(module)] = ParameterGradients(self._recorder, base, wanting)
        for name, parameter in wanting.items():
            hook = ParameterHook(gradients, name, self.is_seen)
            if gradient_hooks(parameter) is None:
                self._hooks.callback(leave_no_hooks, parameter)
            self._hooks.enter_context(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def is_seen(self) -> bool:
        """Whether this thread is the one that started the dump, or runs a backward pass for it."""
        if threading.get_ident() == self._thread:
            return True
        return in_backward() and not _is_of_the_program()

    def _backward_runs(self) -> None:
        """FSDP asks to be called at the end of the backward pass as well; who asks at the end comes after that."""
        if queue_callback is not None and graph_task() != -1:
            task, ask = graph_task(), queue_callback
            for one in self._gradients.values():
                one.backward_begins()
            ask(lambda: ask(lambda: self._backward_ends(task)))

    def _backward_ends(self, task: int) -> None:
        for one in self._gradients.values():
            try:
                one.backward_ends(task)
            except Exception as error:  # what is raised here would end the program's backward pass
                self._recorder.note_error("gradients of sharded parameters", error)

    # -- a forward pass -----------------------------------------------------------------------------------------------

    def forward_begins(self, base: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if module is self._modules[0][1] and any(running.module is module for running in self._running):
            self._running.clear()  # left by an interruption: a whole model is not inside of itself
            recorder.parents.clear()
        name = f"{base}.forward.{recorder.number(base)}"
        running = _RunningModule(recorder, name, list(recorder.parents), module)
        self._running.append(running)
        if id(module) in self._gradients:
            self._gradients[id(module)].inside = [*running.parents, name]
        running.begins(args, kwargs, module)
        recorder.parents.append(name)

    def forward_ends(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        recorder, error = self._recorder, sys.exc_info()[1]
        if not any(running.module is module for running in self._running):
            return  # a hook of the program has raised before ours
        while True:  # those on top of it were left by an error
            running = self._running.pop()
            del recorder.parents[len(running.parents) :]
            if running.module is module:
                break
        if result is not None or error is None or id(error) == running.handled:
            running.ends(result)
        else:
            running.fails(error)


class _RunningModule(ForwardPass):
    """A forward pass of a module that has begun; the program may be handling an error of before."""

    __slots__ = ("handled", "module")

    def __init__(self, recorder: Recorder, name: str, parents: list[str], module: nn.Module) -> None:
        super().__init__(recorder, name, parents)
        self.module, self.handled = module, id(sys.exc_info()[1])


class _Hook(ModuleHook):
    """Before a module's forward pass, or after it."""

    def __init__(self, watch: ModuleWatch, tell: Callable[..., None]) -> None:
        self._watch, self._tell = watch, tell

    def __call__(self, *seen: Any) -> None:
        if not is_tracing() and self._watch.is_seen():
            self._tell(*seen)


def _is_of_the_program() -> bool:
    """Whether this thread is one that the program started; those of autograd's engine for a device are not."""
    return not isinstance(threading.current_thread(), threading._DummyThread)


# -- which modules ----------------------------------------------------------------------------------------------------


def _modules_of(model: Any) -> tuple[list[tuple[str, nn.Module]], bool]:
    """Modules with their paths, without those inside ``torch.compile``; and whether there are such."""
    if isinstance(model, nn.Module):
        named = [("", model)]
    elif isinstance(model, dict):
        named = [(str(key), one) for key, one in model.items()]
    else:
        named = [(str(place), one) for place, one in enumerate(model)]
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    compiled = [list(_walk(one, path, found, seen)) for path, one in named]
    return found, any(any(one) for one in compiled)


def _walk(module: nn.Module, path: str, found: list[tuple[str, nn.Module]], seen: set[int]) -> Iterator[bool]:
    """Depth first, as ``named_modules``; yields whether each is compiled."""
    is_compiled = without_compile(module) is not module
    module = module if is_compiled else unwrapped(module)
    if id(module) in seen:
        return
    seen.add(id(module))
    if compiled_call(module) or isinstance(module, torch.jit.ScriptModule):
        is_compiled = True
    else:
        found.append((path, module))
    yield is_compiled
    if not is_compiled:
        for name, child in module.named_children():
            yield from _walk(child, f"{path}.{name}" if path else name, found, seen)


# -- gradients of parameters -------------------------------------------------------------------------------------------


class ParameterGradients:
    """Of one module: an entry is through when each of its own parameters has its gradient.

    Attributes:
        sharded: parameters whose hooks may not run.
        inside: names of the module's last forward pass and of those around it, innermost last.
    """

    def __init__(self, recorder: Recorder, base: str, parameters: Mapping[str, Tensor]) -> None:
        self._recorder, self._base, self._names = recorder, base, parameters.keys()
        self.sharded = {name: one for name, one in parameters.items() if hasattr(one, "placements")}
        self.inside: list[str] = []
        self._before: dict[str, tuple[int, int]] = {}
        self._hooked: set[tuple[str, int]] = set()
        self._entry: OpenEntry | None = None
        self._is_wanted = False
        self._task = -1

    def backward_begins(self) -> None:
        """As something is first seen of a backward pass: the gradients there are are not of it."""
        self._hooked.clear()
        self._before = {name: _version(one.grad) for name, one in self.sharded.items()}

    def backward_ends(self, task: int) -> None:
        """Those whose hook has not run, where their gradient is another one now."""
        for name, parameter in self.sharded.items():
            gradient = parameter.grad
            if (name, task) in self._hooked or gradient is None or _version(gradient) == self._before.get(name):
                continue
            self.arrived(name, gradient)
        if self.sharded and self._entry is not None:
            self.flush()

    def arrived(self, name: str, gradient: Tensor) -> None:
        recorder = self._recorder
        if self.sharded:
            self._hooked.add((name, graph_task()))
        with recorder.lock:
            if self._entry is not None and (name in self._entry.raw or self._task != graph_task()):
                self.flush()
            if self._entry is None:
                self._begin()
            assert self._entry is not None
            if self._is_wanted:
                with no_dispatch_no_grad():
                    leaves = recorder.leaves_of(self._entry.name)
                    self._entry.raw[name] = [leaves.of(gradient, name)]
            else:
                self._entry.raw[name] = None
            if self._entry.raw.keys() == self._names:
                self.flush()

    def _begin(self) -> None:
        recorder = self._recorder
        what = f"{self._base}.parameters_grad"
        name = f"{what}.{recorder.number(what)}"
        self._is_wanted = recorder.wants_gradients(name, self.inside)
        self._entry = OpenEntry(name, {}, recorder.stack(), None)
        self._task = graph_task()
        recorder.opened(id(self), self)

    def flush(self) -> None:
        entry, self._entry = self._entry, None
        self._recorder.closed(id(self))
        if entry is not None and self._is_wanted:
            self._recorder.write(entry)


class ParameterHook:
    __torch_unserializable__ = True

    def __init__(self, gradients: ParameterGradients, name: str, is_seen: Callable[[], bool]) -> None:
        self._gradients, self._name, self._is_seen = gradients, name, is_seen

    def __call__(self, gradient: Tensor) -> None:
        recorder = self._gradients._recorder
        if recorder.is_active and not is_tracing() and self._is_seen():
            try:
                self._gradients.arrived(self._name, gradient)
            except Exception as error:
                recorder.note_error(f"{self._gradients._base}.parameters_grad.{self._name}", error)


def _version(gradient: Tensor | None) -> tuple[int, int]:
    """What changes when somebody writes to it; FSDP2 adds to the shard inside."""
    return (0, 0) if gradient is None else (id(gradient), shard_version(gradient))
