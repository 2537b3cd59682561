"""Gradients of parameters in a backward pass, an entry for each module that has parameters of its own.

A hook on each parameter brings its gradient before it is accumulated or reduced. Hooks of FSDP2's sharded parameters
do not run: of these, what is in ``grad`` when the backward pass has ended, where that is new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ddpstats._observe.no_dispatch import is_tracing, no_dispatch_no_grad
from ddpstats._observe.torch_compat import graph_task, shard_version
from ddpstats.dump.collect._recorder import OpenEntry, Recorder


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
        name = f"{what}.{recorder.counters.next(what)}"
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
