"""What reads values and talks to other ranks, inside a program that torch compiles or runs without values.

Under `torch.compile` our entry points break the graph, as a plain collective of a group object does: Dynamo neither
looks into them when it meets them, nor compiles what they call. `torch.compiler.disable` does that, but it imports
Dynamo, which takes seconds and is not needed where nothing is compiled; so it is asked once Dynamo is there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ddpstats.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def breaks_graph(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, never traced; at the price of a look into a dict."""
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:
                return function(*args, **kwargs)
            disabled = disable(function)
        return disabled(*args, **kwargs)

    vars(entry).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="it talks to other ranks")  # as disable does
    return entry


def refuse_without_values(what: str) -> None:
    """Raises `ConfigError` under FakeTensorMode and where a graph is recorded: tensors have no values there."""
    torch = sys.modules.get("torch")
    key = getattr(getattr(torch, "_C", None), "_TorchDispatchModeKey", None)
    if key is None:
        return
    active: Any = torch._C._get_dispatch_mode  # type: ignore[union-attr]
    if active(key.FAKE) is not None or active(key.PROXY) is not None:
        raise ConfigError(
            f"{what} was called under FakeTensorMode, or while a graph is recorded: tensors have no values there, so "
            "there is nothing to reduce. Call it outside."
        )
