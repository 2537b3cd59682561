"""The context of one micro-batch, which capture and sentinel hand out; and the number of a step."""

from __future__ import annotations

import operator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from ddpstats.errors import ConfigError

T_co = TypeVar("T_co", covariant=True)

_MOST_STEPS = 10**15


class Owner(Protocol[T_co]):
    """The object that handed out the micro-batch, and hears of its begin and end."""

    def _begin(self, running: Any, batch: Any, /) -> T_co:
        """What the context gives. Raises where a micro-batch cannot begin now."""

    def _end(self, error: BaseException | None, /) -> BaseException | None:
        """The micro-batch ended, or raised ``error``. Returns what to raise in place of that; None leaves it."""


class Running(Generic[T_co]):
    """Around the forward and backward pass of one micro-batch; entered once."""

    def __init__(self, owner: Owner[T_co], batch: Any) -> None:
        self._owner, self._batch, self._entered = owner, batch, False

    def __enter__(self) -> T_co:
        if self._entered:
            raise ConfigError("this micro_batch() was entered before; each micro-batch takes one of its own")
        batch, self._batch, self._entered = self._batch, None, True
        return self._owner._begin(self, batch)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        other = self._owner._end(error)
        if other is not None:
            raise other from error


def checked_step(step: Any, call: str) -> int:
    """The caller's number of a step. Raises `ConfigError`, which names ``call``."""
    try:
        found = operator.index(step)
    except TypeError:
        found = -1
    if not 0 <= found < _MOST_STEPS:
        raise ConfigError(f"{call}(step={step!r}): a whole number, 0 or more")
    return found
