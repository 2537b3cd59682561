"""A training step run once more by one rank alone: under the precision that it had, and with no collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from ddpstats._observe import collectives
from ddpstats._observe.c10d_operators import Collective
from ddpstats._observe.torch_compat import in_backward
from ddpstats.errors import ConfigError


@contextmanager
def no_collectives(what: str) -> Iterator[None]:
    """No collective may run in this thread, or in a backward pass: no other rank takes part.

    Those of other threads, such as a checkpoint that is written meanwhile on a group of its own, go on as they do.
    ``what``: the user's function, for the error, `ConfigError`.
    """
    watcher = _Refusing(what)
    collectives.subscribe(watcher)
    try:
        yield
    finally:
        collectives.unsubscribe(watcher)


class _Refusing:
    def __init__(self, what: str) -> None:
        self._what, self._thread = what, threading.get_ident()

    def before(self, call: Collective) -> None:
        # An accelerator's part of a backward pass runs in threads of autograd's own.
        if threading.get_ident() != self._thread and not in_backward():
            return
        raise ConfigError(f"{self._what} communicates ({call.op}), and only one rank runs it here")

    def after(self, call: Collective, work: Any) -> None:
        pass

    def waiting(self, work: Any, limited: bool) -> bool:
        return False


@contextmanager
def forward_under(model: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Every forward pass of ``model`` runs under a new ``context()``; what the step does around it does not."""
    forward, own = model.forward, "forward" in vars(model)

    def wrapped(*args: Any, **named: Any) -> Any:
        with context():
            return forward(*args, **named)

    model.forward = wrapped
    try:
        yield
    finally:
        if own:
            model.forward = forward
        else:
            del model.forward
