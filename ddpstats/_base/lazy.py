"""Names that are loaded at their first use (PEP 562), and questions to torch that do not import it.

Under `torch.compile` our entry points break the graph, as a plain collective of a group object does: Dynamo neither
traces into them, nor compiles what they call. `torch.compiler.disable` does that, but it imports Dynamo, which takes
seconds and is not needed where nothing is compiled. So it is called only after a program has imported Dynamo.

These are torch's private names that are needed below `_observe.torch_compat`. What a program may import later is
looked up at every call.

- ``torch._dynamo``: whether anything is compiled. Without it nothing is.
- ``_torchdynamo_disable``, ``_torchdynamo_disable_msg``: what ``torch.compiler.disable`` leaves on a function. A torch
  that reads other names traces into ours.
- ``torch._C._dynamo.eval_frame.get_eval_frame_callback``: whether the running code is compiled. Without it, it may be.
- ``torch._C._TorchDispatchModeKey``, ``torch._C._get_dispatch_mode``: whether tensors have values. Without them nothing
  is refused, and torch's own error says that a value was asked for.
- ``torch._subclasses.fake_tensor.FakeTensor``: the same for one tensor.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from ddpstats.errors import ConfigError

# -- names of packages -------------------------------------------------------------------------------------------------


def lazy_names(
    package: str, home_of: Mapping[str, str], submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for ``package``.

    Args:
        package: its ``__name__``.
        home_of: the module of each lazy name, relative to ``ddpstats``.
        submodules: the package's own modules that can be used without an import.
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


# -- programs that torch compiles, or runs without values --------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")

DYNAMO = "torch._dynamo"  # optimizers and DDP import it at their first use, which takes seconds


def breaks_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, never traced by Dynamo and called without Dynamo's import."""
    disabled: Callable[P, R] | None = None
    is_compiling = _compiler_probe()

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if not is_compiling() or DYNAMO not in sys.modules:
            return function(*args, **kwargs)
        disabled = disabled or sys.modules[DYNAMO].disable(function)
        return disabled(*args, **kwargs)

    # As torch.compiler.disable does.
    vars(entry).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="it talks to other ranks")
    return entry


def _compiler_probe() -> Callable[[], object]:
    """Return a cheap function whose result is true if a frame that runs now would be compiled."""
    probe: Any = getattr(sys.modules.get("torch"), "_C", None)
    for name in ("_dynamo", "eval_frame", "get_eval_frame_callback"):
        probe = getattr(probe, name, None)
    return probe or (lambda: True)


def refuse_without_values(what: str) -> None:
    """Raise `ConfigError` under FakeTensorMode and while a graph is recorded: tensors have no values there."""
    active, fake, proxy = _dispatch_modes()
    if active(fake) is not None or active(proxy) is not None:
        raise ConfigError(
            f"{what} was called under FakeTensorMode, or while a graph is recorded: tensors have no values there, so "
            "there is nothing to reduce. Call it outside."
        )


@functools.cache
def _dispatch_modes() -> tuple[Callable[[Any], Any], Any, Any]:
    """Return which function of torch says whether a mode is active, and the modes without values."""
    torch_c: Any = getattr(sys.modules.get("torch"), "_C", None)
    key, active = getattr(torch_c, "_TorchDispatchModeKey", None), getattr(torch_c, "_get_dispatch_mode", None)
    return (lambda mode: None, 0, 0) if key is None or active is None else (active, key.FAKE, key.PROXY)


def is_fake(value: object) -> bool:
    """Return whether it is a FakeTensor, which has no value; false if torch has not imported that class."""
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(value, kind)
