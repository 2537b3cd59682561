"""Hooks on a user's module, which may be copied while it is hooked."""

from __future__ import annotations

import contextlib
from typing import Any


class ModuleHook:
    """Base of what is registered on a module and acts for that module, never for a copy of it.

    The module may be pickled and copied (``torch.save``, ``copy.deepcopy``) while it is hooked: there it gets a hook
    that does nothing, and that needs no ddpstats where the module is loaded.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments, returns None
