"""Hooks on a user's module, which may be copied while it is hooked."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ModuleHook:
    """Base of what is registered on a module and acts for that module, never for a copy of it.

    The module may be pickled and copied (``torch.save``, ``copy.deepcopy``) while it is hooked: there it gets a hook
    that does nothing, and that needs no ddpstats where the module is loaded.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments, returns None


class ForwardBegins(ModuleHook):
    """Before a forward pass of ``module``, and of no copy of it, calls ``tell(owner)``; keeps neither of them alive."""

    def __init__(self, module: Any, owner: T, tell: Callable[[T], None]) -> None:
        self._module, self._owner, self._tell = weakref.ref(module), weakref.ref(owner), tell

    def __call__(self, module: Any, args: Any) -> None:
        owner = self._owner()
        if owner is not None and module is self._module():
            self._tell(owner)
