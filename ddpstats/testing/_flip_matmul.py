"""Bit flips in results of matrix products, inside the operator.

A matmul is flipped by a kernel of ours in the place of the CPU's own, from the entry to the end of the block. Outside
of the module it hands on to the CPU's own, and computes by it inside, too. No other thread may multiply matrices in the
moment in which the block begins or ends. Products on other devices are not reached. Checked on torch 2.13.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe.gradients import unwrapped
from ddpstats._observe.torch_compat import Kernels, kernel_at, keys_of_device
from ddpstats.errors import ConfigError
from ddpstats.testing._flip_fault import Fault


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
_lock = threading.Lock()


def _begin() -> None:
    global _users, _kernels
    with _lock:
        if _kernels is None:
            _kernels = Kernels("aten", "CPU", {op: _kernel(op) for op in _OPS}, replaces=True)
        _users += 1


def _end() -> None:
    global _users, _kernels
    with _lock:
        _users -= 1
        if not _users and _kernels is not None:
            _kernels.remove()
            _kernels = None


def _after_fork() -> None:
    """Another thread of the parent may have held the lock; and its modules do not run here."""
    global _lock
    _lock = threading.Lock()
    _targets.clear()


os.register_at_fork(after_in_child=_after_fork)


def _kernel(op: str) -> Callable[..., Tensor]:
    if kernel_at is None:
        raise ConfigError(f"torch {torch.__version__} does not tell its kernels: bits in products cannot be flipped")
    compute = kernel_at(f"aten::{op}", "CPU").call_boxed
    cpu = keys_of_device("cpu", False)

    def kernel(*args: Tensor, **kwargs: Any) -> Tensor:
        result: Tensor = compute(cpu, *args, **kwargs)
        if _targets:
            operands = (op, *((one.data_ptr(), one.shape, one.stride()) for one in args))
            for target in list(_targets):
                if target.is_hit(operands):
                    target.fault.strike(result)
        return result

    return kernel
