"""What capture and sentinel are alike in: micro-batches, one after the other, and a step that all ranks judge."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from ddpstats._base.lazy import refuse_without_values
from ddpstats._base.text import holders_lines
from ddpstats._ranks.calls import channel_of
from ddpstats._ranks.gather import gather_trees
from ddpstats.errors import ConfigError

T_co = TypeVar("T_co", covariant=True)
W = TypeVar("W", bound="StepWatch")

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


class StepWatch:
    """Base of what watches one optimizer step after the other, and judges it on all ranks of ``group`` together.

    A copy of one, as of a module that keeps it, is closed.

    Args:
        method: what judges the step, for messages: "NaNCapture.check".
    """

    def __init__(self, method: str, group: Any) -> None:
        channel = channel_of(group)
        self._method, self._group = method, group
        self._ranks, self._rank = tuple(channel.ranks), int(channel.rank)
        self._step = 0
        self._running: Running[Any] | None = None
        self._problem: Exception | None = None  # of this rank, until every rank hears of it
        self._agreed = False  # all ranks made theirs with the same settings
        self._closed = ""  # why nothing can begin any more

    def _closes(self, *closing: Callable[[], None]) -> None:
        """What takes hooks and threads away, at `close` or once nobody holds this; so none of it may hold this."""
        self._finalizer = weakref.finalize(self, _close_all, closing)

    def close(self) -> None:
        """Take hooks and threads away. Local; idempotent."""
        if not self._closed:
            self._closed = "after close()"
            self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        """A copy is closed: what is watched is the model that was given, and no copy of it."""
        closed = f"of a copy, which watches nothing: make a {type(self).__name__} for the copied model"
        state = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {
            **state,
            "_method": self._method,
            "_step": self._step,
            "_closed": closed,
            "_running": None,
            "_group": None,
        }

    def __enter__(self: W) -> W:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refuse_micro_batch(self) -> None:
        """Raises `ConfigError` where none can begin now."""
        if self._closed or self._running is not None:
            raise ConfigError(f"micro_batch() {self._closed or 'inside another micro_batch()'}")

    def _refuse_to_judge(self) -> None:
        """Raises where a step cannot be judged now. Comes first: a step that is not judged is not forgotten."""
        if self._closed or self._running is not None:
            raise ConfigError(f"{self._method}() {self._closed or 'inside micro_batch()'}")
        refuse_without_values(self._method)

    def _gathered(self, tree: Callable[[], Any], what: str) -> dict[int, Any]:
        """Every rank's tree, by global rank. Collective."""
        found = gather_trees(tree, name=f"{self._method}: {what}", group=self._group)
        return dict(zip(self._ranks, found, strict=True))

    def _agree_on(self, settings: Mapping[str, Any], advice: str, **besides: Any) -> dict[int, Any]:
        """Once: a verdict is the same on every rank only if all were told to do the same. Collective.

        ``advice``: as `refuse_differences`. Returns each rank's ``besides``, by global rank.
        """
        told = self._gathered(lambda: {"settings": settings, **besides}, "settings")
        own = {rank: tree["settings"] for rank, tree in told.items()}
        refuse_differences(own, self._method.partition(".")[0], advice)
        self._agreed = True
        return told


def _close_all(closing: Sequence[Callable[[], None]]) -> None:
    for close in closing:
        close()


def checked_step(step: Any, call: str) -> int:
    """The caller's number of a step. Raises `ConfigError`, which names ``call``."""
    try:
        found = operator.index(step)
    except TypeError:
        found = -1
    if not 0 <= found < _MOST_STEPS:
        raise ConfigError(f"{call}(step={step!r}): a whole number, 0 or more")
    return found


def scale_of(scaler: Any) -> float | None:
    """Of a GradScaler, now; None where there is none, or it is off."""
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None


def refuse_differences(by_rank: Mapping[int, Mapping[str, Any]], what: str, advice: str) -> None:
    """Raise `ConfigError` on every rank if the settings of ranks differ: their verdicts could not agree.

    Args:
        by_rank: each rank's settings by name; the same mapping on every rank.
        what: the objects that are made with these settings.
        advice: the last sentence of the message.
    """
    first = next(iter(by_rank.values()))
    differing = [name for name in first if any(settings[name] != first[name] for settings in by_rank.values())]
    if differing:
        texts = {rank: ", ".join(f"{name}={own[name]!r}" for name in differing) for rank, own in by_rank.items()}
        lines = [f"ranks made their {what} with different settings:", *holders_lines(texts), advice]
        raise ConfigError("\n".join(lines), ranks=by_rank)
