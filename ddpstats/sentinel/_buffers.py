"""Buffers as they were when a step began: as replicas have them alike, before batch norm changes each rank's own.

DistributedDataParallel has broadcast rank 0's by the time the module inside it begins its forward pass: there they are
copied, in the steps in which somebody wants them. Running statistics that nobody broadcasts are left out. After a
forward pass that trained nothing it broadcasts none: then no buffer in it is looked at in this step.

Checked on torch 2.13. Of its internals: ``DistributedDataParallel.parameters_to_ignore`` and
``will_sync_module_buffers``; without the first nothing more is ignored, without the second ``broadcast_buffers`` says
whether running statistics count.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats._observe.module_hooks import ModuleHook
from ddpstats._observe.torch_compat import buffers_of
from ddpstats._rerun.step_record import BufferCopies

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class Unit:
    """A module whose forward pass copies its buffers: the one in a DistributedDataParallel, or the model around them.

    Args:
        prefix: of its names in the model.
        replica: the DistributedDataParallel around it; None where there is none.
        others: what other units see to.
    """

    def __init__(
        self, prefix: str, module: nn.Module, replica: DistributedDataParallel | None, others: Sequence[nn.Module] = ()
    ) -> None:
        self.module = module
        self._prefix, self._replica, self._others = prefix, replica, others
        self._buffers: BufferCopies | None = None
        self._taken: dict[str, Tensor] | None = None
        self._handle: Any = None

    def ignored(self) -> set[str]:
        """Names in ``module`` that DistributedDataParallel leaves alone."""
        return set(getattr(self._replica, "parameters_to_ignore", None) or ())

    def expect(self) -> None:
        """The next forward pass copies the buffers. Only until then there is a hook: compiled modules mind them."""
        self.forget()
        self._handle = self.module.register_forward_pre_hook(_BufferHook(self), prepend=True)

    def taken(self) -> dict[str, Tensor] | None:
        """Name in the model -> copy, of the buffers that must be equal; None where no forward pass came, or no
        broadcast with it.
        """
        return self._taken

    def forget(self) -> None:
        self._taken = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def close(self) -> None:
        self.forget()
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None

    def _about_to_run(self) -> None:
        self.forget()
        if any(nn.parameter.is_lazy(buffer) for buffer in self.module.buffers()) or self._misses_its_broadcast():
            return
        if self._buffers is None:
            self._buffers = BufferCopies(self.module)
        left_out = self.ignored() | self._others_names()
        if self._replica is None or not self._replica.broadcast_buffers:
            left_out |= running_names(self.module)
        copies = self._buffers.take()
        self._taken = {self._prefix + name: copy for name, copy in copies.items() if name not in left_out}

    def _misses_its_broadcast(self) -> bool:
        """After a forward pass that trained nothing: each rank has changed its buffers by itself."""
        if self._replica is None or not self._replica.broadcast_buffers:
            return False
        will_sync = getattr(self._replica, "will_sync_module_buffers", None)
        return will_sync is not None and not will_sync()

    def _others_names(self) -> set[str]:
        theirs = {id(buffer) for module in self._others for buffer in module.buffers()}
        return {name for name, buffer in self.module.named_buffers() if id(buffer) in theirs}


class _BufferHook(ModuleHook):
    """Tells the unit that its module, and no copy of it, is about to run."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, module: nn.Module, args: Any) -> None:
        unit = self._unit()
        if unit is not None and module is unit.module:
            unit._about_to_run()


def units_of(model: nn.Module, replicas: Sequence[DistributedDataParallel]) -> list[Unit]:
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    units = [Unit(prefixes.get(id(one.module), ""), one.module, one) for one in replicas]
    if all(unit.module is not model for unit in units):
        units.append(Unit("", model, None, [unit.module for unit in units]))
    return units


def running_names(module: nn.Module) -> set[str]:
    """Batch norm's running statistics, which each rank has of its own data; SyncBatchNorm's are of all ranks'."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        if "running_mean" in buffers_of(owner) and not isinstance(owner, nn.SyncBatchNorm)
        for name in _RUNNING
    }
