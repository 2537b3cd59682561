"""Names of a package that are loaded when they are first used (PEP 562).

What reads values and talks to other ranks, inside a program that torch compiles or runs without values.

Under `torch.compile` our entry points break the graph, as a plain collective of a group object does: Dynamo neither
looks into them when it meets them, nor compiles what they call. `torch.compiler.disable` does that, but it imports
Dynamo, which takes seconds and is not needed where nothing is compiled; so it is asked once Dynamo is there.

These are torch's private names that are needed below `_observe.torch_compat`, and without importing torch: each is
looked for at every call, for torch may have been imported meanwhile.

- ``torch._dynamo``: whether anything is compiled. Without it nothing is taken to be.
- ``_torchdynamo_disable``, ``_torchdynamo_disable_msg``: what ``torch.compiler.disable`` leaves on a function. A torch
  that reads other names traces into ours.
- ``torch._C._dynamo.eval_frame.get_eval_frame_callback``: whether what runs now is compiled. Without it it may be.
- ``torch._C._TorchDispatchModeKey``, ``torch._C._get_dispatch_mode``: whether tensors have values. Without them nothing
  is refused, and torch's own error says that a value was asked for.
- ``torch._subclasses.fake_tensor.FakeTensor``: the same for one tensor.
- ``torch._dynamo.utils.counters``: whether anything was compiled so far. Without it, it may have been.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from ddpstats.errors import ConfigError

# -- lazy --------------------------------------------------------------------------------------------------------------


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


# -- compiled ----------------------------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")

DYNAMO = "torch._dynamo"  # for who imports it early: optimizers and DDP do at their first use, for seconds


def breaks_graph(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, never traced; at the price of a look into a dict."""
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            disable = getattr(sys.modules.get(DYNAMO), "disable", None)
            if disable is None:
                return function(*args, **kwargs)
            disabled = disable(function)
        return disabled(*args, **kwargs)

    return never_traced(entry)


def never_traced(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which Dynamo does not look into where it meets it."""
    vars(function).update(
        _torchdynamo_disable=True, _torchdynamo_disable_msg="it talks to other ranks"
    )  # as disable does
    return function


def compiler_probe() -> Callable[[], object]:
    """What says, at little cost, whether a frame that runs now would be compiled: then it is true."""
    found: Any = getattr(sys.modules.get("torch"), "_C", None)
    for name in ("_dynamo", "eval_frame", "get_eval_frame_callback"):
        found = getattr(found, name, None)
    return found or (lambda: True)


def has_compiled() -> bool:
    """Whether this process has compiled anything so far; also where that cannot be told."""
    if DYNAMO not in sys.modules:
        return False
    counters = getattr(sys.modules.get(f"{DYNAMO}.utils"), "counters", None)
    return counters is None or any(counters.values())


def refuse_without_values(what: str) -> None:
    """Raises `ConfigError` under FakeTensorMode and where a graph is recorded: tensors have no values there."""
    torch = sys.modules.get("torch")
    key = getattr(getattr(torch, "_C", None), "_TorchDispatchModeKey", None)
    if key is None:
        return
    active: Any = getattr(torch._C, "_get_dispatch_mode", lambda mode: None)  # type: ignore[union-attr]
    if active(key.FAKE) is not None or active(key.PROXY) is not None:
        raise ConfigError(
            f"{what} was called under FakeTensorMode, or while a graph is recorded: tensors have no values there, so "
            "there is nothing to reduce. Call it outside."
        )


def is_fake(value: object) -> bool:
    """Whether it is a FakeTensor, which has no value; never, where torch has imported no such class."""
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(value, kind)
