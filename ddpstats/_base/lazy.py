"""Names of a package that are loaded when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_names(
    package: str, home_of: Mapping[str, str], submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """What ``__getattr__`` and ``__dir__`` of ``package`` are.

    Args:
        package: its ``__name__``.
        home_of: the module, by name relative to ``ddpstats``, that each lazy name is in.
        submodules: those of the package's own modules that are reached without an import.
    """

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"ddpstats.{home_of[name]}"), name)
        vars(sys.modules[package])[name] = value
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home_of, *submodules})
