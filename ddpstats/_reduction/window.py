"""Stats of many steps, added up on each rank by itself and reduced over ranks once.

>>> import ddpstats
>>> with ddpstats.StatsWindow(name="train") as window:
...     for loss in (0.5, 0.25):
...         window.add({"loss": loss, "tokens": ddpstats.Sum(128)}, weight=8.0)
...     reduced = window.flush()
>>> reduced.values
{'loss': 0.375, 'tokens': 256.0}
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from ddpstats._base.config import check_flag
from ddpstats._base.lazy import breaks_graph, compiler_probe, never_traced, refuse_without_values
from ddpstats._ranks.exchange import Failure
from ddpstats._reduction.flatten import CannotRead, Structure
from ddpstats._reduction.read import Part
from ddpstats._reduction.reducer import NonFinitePolicy, ReductionCounters, StatsReducer
from ddpstats._reduction.result import Reduced
from ddpstats._reduction.window_content import WindowContent
from ddpstats.errors import ConfigError, DdpstatsError, InvalidStats, SchemaConflict

__all__ = ["StatsWindow"]

_TURN_SEC = 30.0
_is_compiling = compiler_probe()
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DYNAMO = os.path.join(os.path.dirname(torch.__file__), "_dynamo")


class StatsWindow:
    """Adds up nested stats, step by step, and reduces them over ranks when asked: one collective for many steps.

    Args:
        group: a process group, or None for the default one. Without torch.distributed, or alone: local arithmetic.
        name: names the place in the program ("train", "valid"), as of `StatsReducer`.
        nonfinite: ``"propagate"``: a NaN stays a NaN in its path. ``"skip"``: each add that has one counts as absent
            for that path. ``"raise"``: `flush` raises `NonFiniteStat` on every rank. Must be the same on every rank.
        timeout_sec: limit of one `flush` in seconds; default DDPSTATS_TIMEOUT_SEC, or 300.

    Raises:
        ConfigError: an argument that cannot work; on this rank, before anything is sent.

    Making one is local. A context manager; leaving it, and `close`, drop what was not flushed. A copy
    (``copy.deepcopy`` of a module that keeps a window, as in weight averaging) is a separate window that starts with
    what was added so far; so is what another process gets, unless there are sums on a device or a ``group=``
    (`ConfigError`).
    """

    def __init__(
        self,
        *,
        group: Any = None,
        name: str | None = None,
        nonfinite: NonFinitePolicy = "propagate",
        timeout_sec: float | None = None,
    ) -> None:
        self._reducer = StatsReducer(group=group, name=name, nonfinite=nonfinite, timeout_sec=timeout_sec)
        call = replace(self._reducer._call, kind="StatsWindow.flush")
        self._reducer._call, self._per_rank_call = call, replace(call, per_rank=True)
        self._lock = threading.Lock()
        self._last_structure: Structure | None = None
        self._content = WindowContent(call.skips)

    @never_traced
    def add(self, stats: Any, weight: Any = 1.0) -> None:
        """Add one step's stats. Local: no collective, and no device is waited for; any rank may add what it likes.

        Args:
            stats, weight: as `StatsReducer` takes them; keys, lengths of lists and None may change from add to add.
                Values are taken now, on the device where they are: they may change afterwards, and keep no graph alive.

        Raises:
            InvalidStats: a leaf, key, weight or structure that cannot be reduced.
            SchemaConflict: an earlier add since the last flush has another reduce op, or another kind of container,
                under a path.

        Either says where, on this rank alone; the window is then as it was. What only a value on a device shows
        (a weight out of range, a flag that is neither 0 nor 1) is raised by `flush`, on every rank.
        """
        if _is_compiling():
            self._add_untraced(stats, weight)
            return
        if not self._lock.acquire(False):
            self._wait_for_lock()
        try:
            if not self._content.add_again(stats, weight):
                self._add(stats, weight)
        finally:
            self._lock.release()

    @breaks_graph
    def _add_untraced(self, stats: Any, weight: Any) -> None:
        """`add` where the frames that it calls would be compiled, too."""
        with self._exclusive():
            self._add(stats, weight)

    def _add(self, stats: Any, weight: Any) -> None:
        self._refuse_closed()
        refuse_without_values("StatsWindow.add")
        try:
            self._content.add(stats, weight)
        except CannotRead as error:
            failure = error.failure
            where = f" at {failure.path!r}" if failure.path else ""
            raise InvalidStats(
                f"stats that cannot be added{where}: {failure.message}\n{_call_site()}"
                "Nothing was added; the window goes on working.",
                ranks=self._own_rank(),
                path=failure.path or None,
            ) from None
        except SchemaConflict as error:
            raise self._conflict(error) from None
        except DdpstatsError:
            raise
        except Exception as error:  # of a foreign type's code
            raise InvalidStats(
                f"stats that cannot be added: {type(error).__name__}: {error}\n{_call_site()}"
                "Nothing was added; the window goes on working.",
                ranks=self._own_rank(),
            ) from error

    @breaks_graph
    def flush(self, *, per_rank: bool = False) -> Reduced:
        """Reduce what was added since the last flush. Collective: every rank must call, also one without an add.

        One collective where the paths are known, two with `Min` or `Max`, as of `StatsReducer`.

        Args:
            per_rank: also `Reduced.by_rank`, as of `StatsReducer`: what each rank's own adds come to. Must be the same
                on every rank.

        Returns:
            `Reduced`: what one reduction of the stats of all adds of all ranks would give. ``present_ranks`` and
            ``nonfinite_ranks`` count ranks: those with a value, or a NaN or infinity, in some add. ``weights`` holds
            the weight of a mean's adds, and of every other op the number of adds.

        Raises what `StatsReducer` raises. The window is empty afterwards, whether it returns or raises: what cannot be
        reduced now could not be at the next flush, and windows of all ranks begin at the same step. Only a
        `ConfigError` that is raised before anything is sent leaves the window as it was; what another thread has added
        meanwhile then takes its place.
        """
        check_flag("per_rank", per_rank)
        channel = self._reducer._usable_channel()
        channel.refuse_inside()
        refuse_without_values(f"a reduction on {channel.group_name}")
        with self._exclusive():
            content, self._content = self._content, WindowContent(self._reducer._call.skips)
        flushed = _Flushed(content, self._last_structure, per_rank)
        try:
            return self._reducer._run(channel, flushed, call=self._per_rank_call if per_rank else None)
        except ConfigError:
            with self._exclusive():
                if not flushed.is_taken and self.adds == 0:
                    self._content = content
            raise
        finally:
            self._last_structure = flushed.structure

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds spent inside, as a mean over its uses: ``time/NAME``. Local; not counted in `adds`.

        ``values["time"][NAME]`` of the next flush is seconds per use, over the uses of all ranks, and
        ``weights["time"][NAME]`` how often it was used. By the host's clock; where CUDA is in use, by events on the
        current stream as well, and the longer of the two counts: a step that only launches kernels takes as long as
        they do, and a wait for data as long as the host waits. Events are read at the flush; CUDA is never initialised.

        Raises:
            SchemaConflict: on leaving, where the stats of this window have something else under ``time``.
        """
        if not isinstance(name, str):
            raise ConfigError(f"name={name!r} must be a str")
        return self._timed(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started, start_event = time.perf_counter(), _cuda_event()
        try:
            yield
        except BaseException:
            with suppress(DdpstatsError):  # the program has its own error
                self._add_time(name, time.perf_counter() - started, start_event)
            raise
        self._add_time(name, time.perf_counter() - started, start_event)

    def _add_time(self, name: str, seconds: float, start_event: Any) -> None:
        end_event = None if start_event is None else _cuda_event()
        with self._exclusive():
            self._refuse_closed()
            try:
                if end_event is None:
                    self._content.add_time(name, seconds)
                else:
                    self._content.device_times.append((name, seconds, start_event, end_event))
                    self._content.read_device_times()
            except SchemaConflict as error:
                raise self._conflict(error) from None

    @property
    def adds(self) -> int:
        """The number of adds since the last flush."""
        return self._content.adds

    @property
    def counters(self) -> ReductionCounters:
        """The counts of the flushes so far; a frozen copy."""
        return self._reducer.counters

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, and for another process. Waits for the devices whose time is taken."""
        with self._exclusive():
            self._content.read_device_times(wait=True)
            self._content.fold_all()
            return copy.deepcopy({**vars(self), "_lock": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def close(self) -> None:
        """End this window, and drop what was not flushed. Local; idempotent."""
        self._reducer.close()
        self._content = WindowContent(self._reducer._call.skips)

    def __enter__(self) -> StatsWindow:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._wait_for_lock()
        try:
            yield
        finally:
            self._lock.release()

    def _wait_for_lock(self) -> None:
        """Take the lock. Raises `ConfigError` in a call that would wait for itself."""
        if not self._lock.acquire(timeout=_TURN_SEC):
            raise ConfigError(
                f"this StatsWindow has been busy for {_TURN_SEC:g} s: the handler of a signal, or what runs when an "
                "object is collected, called it in the middle of a call on the same thread. Set a flag there, and add "
                "at the next step of the program."
            )

    def _conflict(self, error: SchemaConflict) -> SchemaConflict:
        return SchemaConflict(f"{error}\n{_call_site()}".rstrip(), ranks=self._own_rank(), path=error.path)

    def _own_rank(self) -> tuple[int, ...]:
        try:
            return (self._reducer._usable_channel().rank,)
        except DdpstatsError:  # a group that is gone
            return ()

    def _refuse_closed(self) -> None:
        if self._reducer._closed:
            raise ConfigError("this StatsWindow is closed")


class _Flushed:
    """The content of a window, as a rank's part of a reduction."""

    def __init__(self, content: WindowContent, structure: Structure | None, per_rank: bool) -> None:
        self._content, self.structure, self._per_rank = content, structure, per_rank
        self.is_taken = False

    def part(self) -> Part | Failure:
        """Wait for the devices; never raises. From here on this rank takes part."""
        self.is_taken = True
        try:
            self._content.read_device_times(wait=True)
            part = self._content.part(self.structure, self._per_rank)
        except CannotRead as error:
            return error.failure
        except DdpstatsError as error:
            return Failure(error.path or "", str(error))
        except Exception as error:  # of a device: this rank must still take part
            return Failure("", f"what was added cannot be read: {type(error).__name__}: {error}")
        self.structure = part.structure
        return part


def _call_site() -> str:
    """Return the line of the program that called us, as a line of a message."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, _DYNAMO, contextlib.__file__)):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"Called at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}.\n"


def _cuda_event() -> Any:
    """Return an event on the current stream; None where CUDA is not in use, or a graph is captured."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream())
    return event
