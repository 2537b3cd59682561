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

import copy
import os
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from ddpstats._base.config import check_flag
from ddpstats._base.lazy import breaks_graph, compiler_probe, never_traced, refuse_without_values
from ddpstats._ranks.status import Failure
from ddpstats._reduction.reducer import NonFinitePolicy, ReductionCounters, StatsReducer
from ddpstats._reduction.result import Reduced
from ddpstats._reduction.tree import CannotFlatten, Structure, are_str, flatten
from ddpstats._reduction.values import Part
from ddpstats._reduction.window_content import WindowContent
from ddpstats._reduction.window_rows import LARGEST, Rows
from ddpstats._reduction.window_times import DeviceTimes, Stopwatch
from ddpstats.errors import ConfigError, DdpstatsError, InvalidStats, SchemaConflict

__all__ = ["StatsWindow"]

_TURN_SEC = 30.0
_compiles = compiler_probe()
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DYNAMO = os.path.join(os.path.dirname(torch.__file__), "_dynamo")


class StatsWindow:
    """Adds up nested stats, step by step, and reduces them over ranks when asked: one collective for many steps.

    Args:
        group: a process group, or None for the default one. Without torch.distributed, or alone: local arithmetic.
        name: names the place in the program ("train", "valid"), as of `StatsReducer`.
        nonfinite: ``"propagate"``: a NaN stays a NaN in its path. ``"skip"``: each add that has one counts as absent
            for that path. ``"raise"``: `flush` raises `NonFiniteStat` on every rank. Must be the same on every rank.
        timeout_sec: limit of one `flush` in seconds; default DDPSTATS_TIMEOUT_SEC, else 300.

    Raises:
        ConfigError: an argument that cannot work; on this rank, before anything is sent.

    Making one is local. A context manager; leaving it, and `close`, drop what was not flushed. A copy
    (``copy.deepcopy`` of a module that keeps a window, as in weight averaging) is a window of its own that starts with
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
        self._turn = _Turn()
        self._last_structure: Structure | None = None
        self._empty()

    def _empty(self) -> None:
        self._recent: Rows | None = None
        self._content = WindowContent(self._reducer._call.skips)
        self._device_times = DeviceTimes()

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

        Either says where, on this rank alone; the window is then as it was. What only a value on a device can tell
        (a negative weight, a flag that is neither 0 nor 1) is raised by `flush`, on every rank.
        """
        if _compiles():
            self._add_apart(stats, weight)
            return
        if not self._turn.acquire(False):
            self._turn.wait()
        try:
            rows = self._recent
            if (
                rows is not None
                and type(stats) is dict
                and [*stats] == rows.keys
                and (type(weight) is float or type(weight) is int)
                and 0 < weight <= LARGEST
            ):
                row = rows.read(stats.values())
                if row is not None:
                    rows.weights.append(weight)
                    rows.pending.append(row)
                    if len(rows.weights) == rows.limit:
                        self._content.sum_up(rows)
                    return
            self._add(stats, weight)
        finally:
            self._turn.release()

    @breaks_graph
    def _add_apart(self, stats: Any, weight: Any) -> None:
        with self._turn:
            self._add(stats, weight)

    def _add(self, stats: Any, weight: Any) -> None:
        """The careful way."""
        self._refuse_closed()
        refuse_without_values("StatsWindow.add")
        try:
            flat = flatten(stats)
            keys = [*stats] if type(stats) is dict and are_str(tuple(stats)) else None
            rows = self._content.add(flat, weight, keys)
        except CannotFlatten as error:
            failure = error.failure
            where = f" at {failure.path!r}" if failure.path else ""
            raise InvalidStats(
                f"stats that cannot be added{where}: {failure.message}\n{_caller()}"
                "Nothing was added; the window goes on working.",
                ranks=self._own_rank(),
                path=failure.path or None,
            ) from None
        except SchemaConflict as error:
            raise self._conflict(error) from None
        # A flat dict of plain values is known by its keys; anything else is taken apart.
        self._recent = rows if keys is not None and len(keys) == flat.structure.leaf_count else None

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
        with self._turn:
            content, times = self._content, self._device_times
            self._empty()
        given = _Flushed(content, times, self._last_structure, per_rank)
        try:
            return self._reducer._run(channel, given, call=self._per_rank_call if per_rank else None)
        except ConfigError:
            if not given.is_taken:
                self._put_back(content, times)
            raise
        finally:
            self._last_structure = given.structure

    def _put_back(self, content: WindowContent, times: DeviceTimes) -> None:
        with self._turn:
            if self.adds == 0:
                self._content, self._device_times, self._recent = content, times, None

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
        return _Timed(self, name)

    def _add_time(self, name: str, watch: Stopwatch) -> None:
        try:
            with self._turn:
                self._refuse_closed()
                if watch.on_device:
                    self._device_times.append(name, watch)
                    for earlier, seconds in self._device_times.finished():
                        self._content.add_time(earlier, seconds)
                else:
                    self._content.add_time(name, watch.seconds())
        except SchemaConflict as error:
            raise self._conflict(error) from None

    @property
    def adds(self) -> int:
        """How many adds there were since the last flush."""
        return self._content.adds

    @property
    def counters(self) -> ReductionCounters:
        """What the flushes have done so far; a frozen copy."""
        return self._reducer.counters

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, and for another process. Waits for the devices whose time is taken."""
        with self._turn:
            for name, seconds in self._device_times.finished(wait=True):
                self._content.add_time(name, seconds)
            state = copy.deepcopy({**vars(self), "_turn": None, "_recent": None})
        state["_content"].sum_up_rows()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _turn=_Turn())

    def close(self) -> None:
        """End this window, and drop what was not flushed. Local; idempotent."""
        self._reducer.close()
        self._empty()

    def __enter__(self) -> StatsWindow:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _conflict(self, error: SchemaConflict) -> SchemaConflict:
        return SchemaConflict(f"{error}\n{_caller()}".rstrip(), ranks=self._own_rank(), path=error.path)

    def _own_rank(self) -> tuple[int, ...]:
        try:
            return (self._reducer._usable_channel().rank,)
        except DdpstatsError:  # a group that is gone
            return ()

    def _refuse_closed(self) -> None:
        if self._reducer._closed:
            raise ConfigError("this StatsWindow is closed")


class _Turn:
    """A lock, of which a call that waits for itself is told."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self.acquire, self.release = lock.acquire, lock.release

    def wait(self) -> None:
        if not self.acquire(timeout=_TURN_SEC):
            raise ConfigError(
                f"this StatsWindow has been busy for {_TURN_SEC:g} s: the handler of a signal, or what runs when an "
                "object is collected, called it in the middle of a call on the same thread. Set a flag there, and add "
                "at the next step of the program."
            )

    def __enter__(self) -> None:
        self.wait()

    def __exit__(self, *exc: object) -> None:
        self.release()


class _Timed(AbstractContextManager[None]):
    """One use of `StatsWindow.timed`."""

    def __init__(self, window: StatsWindow, name: str) -> None:
        self._window, self._name = window, name

    def __enter__(self) -> None:
        self._watch = Stopwatch()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._watch.stop()
        try:
            self._window._add_time(self._name, self._watch)
        except DdpstatsError:
            if kind is None:  # else the program has an error of its own
                raise


class _Flushed:
    """What a window held, as a rank's part of a reduction."""

    def __init__(self, content: WindowContent, times: DeviceTimes, structure: Structure | None, per_rank: bool) -> None:
        self._content, self._times, self.structure, self._per_rank = content, times, structure, per_rank
        self.is_taken = False

    def part(self) -> Part | Failure:
        """Waits for the devices; never raises. From here on this rank takes part."""
        self.is_taken = True
        try:
            for name, seconds in self._times.finished(wait=True):
                self._content.add_time(name, seconds)
            part = self._content.part(self.structure, self._per_rank)
        except DdpstatsError as error:
            return Failure(error.path or "", str(error))
        except Exception as error:  # of a device: this rank must still take part
            return Failure("", f"what was added cannot be read: {type(error).__name__}: {error}")
        if isinstance(part, Part):
            self.structure = part.structure
        return part


def _caller() -> str:
    """The line of the program that called us, as a line of a message."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, _DYNAMO)):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"Called at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}.\n"
