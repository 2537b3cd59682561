"""The current step, kept so that it can be run once more: batches, random state and buffers.

For each optimizer step:

1. `begin` of a micro-batch takes the batch by reference, notes the version counter of each of its tensors, and takes
   the random state: after loading, because a loader may draw from the process's own generators.
2. The first forward pass of the step copies the module's buffers, inside the module: by then DistributedDataParallel
   has broadcast rank 0's. The first forward pass of each micro-batch notes the autocast settings.
3. `end` looks whether the batch was changed in place. If it was, later batches are copied at `begin`: a reference is
   of no use there. So are arrays of numpy, which count no versions.
4. `clear` forgets the step.

Memory: one step's batches stay alive as long as the step, and one copy of the buffers. Nothing is drawn from any
generator.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
)

from ddpstats._random_state import RandomState as RandomState


@dataclass
class MicroBatch:
    """One micro-batch, as it was just before its forward pass.

    Attributes:
        batch: containers of its own around the caller's very tensors; around copies where these must be.
        random: the generators' state.
        autocast: (device type, enabled, dtype) when the module was called first; None before that.
        loss: what was differentiated, without a GradScaler's scale; if the caller says so.
        factor: what a trainer multiplied the step's own loss by before ``backward()``, with a GradScaler's scale: of
            the shape of that loss, or a number; None where the step's own loss was differentiated.
        changed: paths of tensors that were changed in place since.
    """

    batch: Any
    random: RandomState
    autocast: tuple[str, bool, torch.dtype] | None = None
    loss: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    changed: tuple[str, ...] = ()
    _tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def look_for_changes(self) -> bool:
        """Whether some tensor was changed in place since the micro-batch began."""
        moved = {id(tensor) for tensor, version in self._tensors if tensor._version != version}
        if moved:
            self.changed = tuple(path for path, leaf in walk(self.batch) if id(leaf) in moved)
        return bool(moved)


class StepRecord:
    """The current optimizer step of ``module``, on this rank. Local.

    Args:
        module: inside any DistributedDataParallel: its forward pass is the moment at which buffers are as they count.

    Attributes:
        micro_batches: since `clear`.
        buffers: name -> copy, as before the step; the next step overwrites it.
        copies: whether batches are copied, because one was changed in place; the caller may set it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.micro_batches: list[MicroBatch] = []
        self.buffers: dict[str, torch.Tensor] | None = None
        self.copies = False
        self._current: MicroBatch | None = None
        self._copies = BufferCopies(module)
        reference = weakref.ref(self)  # the module must not keep the record alive

        def about_to_run(module: torch.nn.Module, args: Any) -> None:
            record = reference()
            if record is not None and record._current is not None:
                record._about_to_run(record._current)

        self._handle = module.register_forward_pre_hook(about_to_run, prepend=True)

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        first = next(self.module.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def begin(self, batch: Any) -> MicroBatch:
        """A micro-batch is about to run. Its forward and backward pass come before `end`."""
        tensors: list[tuple[torch.Tensor, int]] = []
        kept = _kept(batch, self.copies, tensors)
        self._current = MicroBatch(kept, RandomState.take(self.device), _tensors=tensors)
        self.micro_batches.append(self._current)
        return self._current

    def end(self) -> None:
        """The micro-batch is through."""
        current, self._current = self._current, None
        if self.buffers is None:  # a program that calls other methods of the module than its forward
            self._copy_buffers()
        if current is not None and current.look_for_changes():
            self.copies = True

    def clear(self) -> None:
        """The step is over: let go of its batches."""
        self.micro_batches = []
        self.buffers = None
        self._current = None

    def close(self) -> None:
        """Take the hook away. Idempotent."""
        self._handle.remove()
        self._copies.close()
        self.clear()

    def _about_to_run(self, current: MicroBatch) -> None:
        if self.buffers is None:
            self._copy_buffers()
        if current.autocast is None:
            kind = self.device.type
            current.autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _copy_buffers(self) -> None:
        self.buffers = self._copies.take()


class BufferCopies:
    """A copy of every buffer of a module, taken anew into the same memory as long as the buffers stay the same ones."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._known: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
        self._copies: dict[str, torch.Tensor] = {}
        self._twins: list[torch.Tensor] = []
        self._outdated = True
        reference = weakref.ref(self)

        def registered(module: torch.nn.Module, name: str, value: Any) -> None:
            copies = reference()
            if copies is not None:
                copies._outdated = True

        # Walking all modules costs more than the copies: only where some module got a buffer or a module.
        self._handles = [
            register_module_buffer_registration_hook(registered),
            register_module_module_registration_hook(registered),
        ]

    def take(self) -> dict[str, torch.Tensor]:
        """Name -> copy, as of now. The next call overwrites them. Local."""
        with torch.no_grad():
            if self._outdated or not all(
                owner.get(key) is buffer and buffer.shape == twin.shape
                for (owner, key, buffer), twin in zip(self._known, self._twins, strict=True)
            ):
                self._learn()
            if self._twins:
                torch._foreach_copy_(self._twins, [buffer for _, _, buffer in self._known])
        return self._copies

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        for handle in self._handles:
            handle.remove()

    def _learn(self) -> None:
        self._outdated = False
        self._known, self._copies = [], {}
        for prefix, owner in self._module.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    self._known.append((owner._buffers, key, buffer))
                    self._copies[f"{prefix}.{key}" if prefix else key] = torch.empty_like(buffer)
        self._twins = list(self._copies.values())


def walk(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """(path, leaf) for every leaf of nested containers, in the order of `begin`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from walk(item, f"{path}[{place}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from walk(getattr(value, one.name), f"{path}.{one.name}")
    else:
        yield path, value


def _kept(value: Any, copies: bool, tensors: list[tuple[torch.Tensor, int]]) -> Any:
    """New containers, so that a key taken out later is still there; the leaves themselves, or copies."""
    if isinstance(value, torch.Tensor):
        if copies or value.is_inference():  # which counts no versions
            return value.detach().clone()
        tensors.append((value, value._version))
        return value
    if isinstance(value, Mapping):
        kept = {key: _kept(item, copies, tensors) for key, item in value.items()}
        return kept if type(value) is dict else _refilled(value, kept)
    if isinstance(value, (list, tuple)):
        items = [_kept(item, copies, tensors) for item in value]
        if type(value) is list:
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for one in fields(value):
            object.__setattr__(twin, one.name, _kept(getattr(value, one.name), copies, tensors))
        return twin
    return value.copy() if type(value).__module__ == "numpy" and hasattr(value, "copy") else value


def _refilled(mapping: Any, kept: dict[Any, Any]) -> Any:
    """A mapping of the same kind where that can be made: a copy of it, with other values."""
    try:
        twin = copy.copy(mapping)
        twin.update(kept)
    except Exception:  # read-only, or a class with a mind of its own
        return kept
    return twin
