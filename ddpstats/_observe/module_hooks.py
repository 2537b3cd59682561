"""Hooks on a user's module, which may be copied while it is hooked."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ddpstats._base.lazy import breaks_graph

T = TypeVar("T")


class ModuleHook:
    """Base of what is registered on a module and acts for that module, never for a copy of it.

    The module may be pickled and copied (``torch.save``, ``copy.deepcopy``) while it is hooked: there it gets a hook
    that does nothing, and that needs no ddpstats where the module is loaded.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments, returns None


class ForwardBegins(ModuleHook):
    """Before a forward pass of ``module``, and of no copy of it, calls ``tell(owner)``; keeps neither of them alive.

    Where the forward pass is compiled, hooks and all, a module ``in_replica`` (a DistributedDataParallel, which breaks
    the graph by itself) has it broken here, too. Any other is run without a call: the graph may have to be whole.
    """

    def __init__(self, module: Any, owner: T, tell: Callable[[T], None], in_replica: bool) -> None:
        self._module, self._owner, self._tell = weakref.ref(module), weakref.ref(owner), tell
        self._breaks = in_replica

    def __call__(self, module: Any, args: Any) -> None:
        if self._breaks or not torch.compiler.is_compiling():
            self._begins(module)

    @breaks_graph
    def _begins(self, module: Any) -> None:
        owner = self._owner()
        if owner is not None and module is self._module():
            self._tell(owner)
