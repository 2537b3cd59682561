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
import math
import os
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

import torch

from ddpstats._base.config import check_flag
from ddpstats._base.lazy import breaks_graph, refuse_without_values
from ddpstats._base.paths import Path, format_path
from ddpstats._ranks.device import accelerator_in_use, is_capturing, record_event, seconds_between
from ddpstats._ranks.exchange import Failure, InvalidLeaf, failure_of
from ddpstats._reduction.flatten import LIST, NUMBERS, LeafKey, Structure, Tag, flatten
from ddpstats._reduction.layout import describe, sorts_of
from ddpstats._reduction.ops import NONE, OPS, Mean
from ddpstats._reduction.read import (
    HEAVIEST,
    LIGHTEST,
    Part,
    PartOnDevice,
    Plan,
    Row,
    as_tensor,
    plan_of,
    read_row,
    snapshot_if_off_host,
)
from ddpstats._reduction.reduce import Reduction
from ddpstats._reduction.reducer import NonFinitePolicy, ReductionCounters, StatsReducer
from ddpstats._reduction.result import Reduced
from ddpstats.errors import ConfigError, DdpstatsError, InvalidStats, SchemaConflict

__all__ = ["StatsWindow"]

_TURN_SEC = 30.0
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
    what was added so far; so is what another process gets, unless there is a ``group=`` (`ConfigError`).
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
        call = self._reducer._call._replace(kind="StatsWindow.flush")
        self._reducer._call = call
        self._lock = threading.Lock()
        self._content = _Content(call.skips)

    @breaks_graph
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
        if not self._lock.acquire(False):
            self._wait_for_lock()
        try:
            if not self._content.add_again(stats, weight):
                self._add(stats, weight)
        finally:
            self._lock.release()

    def _add(self, stats: Any, weight: Any) -> None:
        self._refuse_closed()
        refuse_without_values("StatsWindow.add")
        try:
            self._content.add(stats, weight)
        except SchemaConflict as error:
            raise self._conflict(error) from None
        except DdpstatsError:
            raise
        except Exception as error:
            failure = failure_of(error, "they cannot be read")
            where = f" at {failure.path!r}" if failure.path else ""
            raise InvalidStats(
                f"stats that cannot be added{where}: {failure.message}\n{_call_site()}"
                "Nothing was added; the window goes on working.",
                ranks=self._own_rank(),
                path=failure.path or None,
            ) from (None if isinstance(error, InvalidLeaf) else error)  # otherwise of a foreign type's code

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
        reducer = self._reducer
        call, channel = reducer._call._replace(per_rank=per_rank), reducer._usable_channel()
        channel.refuse_inside()  # before there is a new content, whose tensors would be fake there
        channel.refuse_here()
        with self._exclusive():
            content, self._content = self._content, _Content(call.skips)
        content.per_rank = per_rank
        try:
            part = PartOnDevice(content.has_arrived, content.part)
            return channel.run(Reduction(call, part, reducer._counters).perform, reducer._timeout_sec)
        except ConfigError:
            with self._exclusive():
                if not content.is_flushed and self.adds == 0:
                    self._content = content
            raise
        finally:
            self._content.structure = content.structure

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside, as a mean over its uses: ``time/NAME``. Local; not counted in `adds`.

        ``values["time"][NAME]`` of the next flush is seconds per use, over the uses of all ranks, and
        ``weights["time"][NAME]`` how often it was used. By the host's clock; where an accelerator is in use, by
        events on its current stream as well, and the longer of the two counts: a step that only launches kernels takes
        as long as they do, and a wait for data as long as the host waits. Events are read at the flush; no accelerator
        is initialised.

        Raises:
            SchemaConflict: on leaving, where the stats of this window have another value under ``time``.
        """
        if not isinstance(name, str):
            raise ConfigError(f"name={name!r} must be a str")
        started, start_event = time.perf_counter(), record_event(timing=True)
        try:
            yield
        except BaseException:
            with suppress(DdpstatsError):  # the program has its own error
                self._add_time(name, time.perf_counter() - started, start_event)
            raise
        self._add_time(name, time.perf_counter() - started, start_event)

    def _add_time(self, name: str, seconds: float, start_event: Any) -> None:
        end_event = None if start_event is None else record_event(timing=True)
        with self._exclusive():
            self._refuse_closed()
            try:
                self._content.add_time(name, seconds, start_event, end_event)
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
        """Return the state for a copy, and for another process. Waits for the devices."""
        with self._exclusive():
            self._content.read_pending(wait=True)
            self._content.fold_all()
            return copy.deepcopy({**vars(self), "_lock": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def close(self) -> None:
        """End this window, and drop what was not flushed. Local; idempotent."""
        self._reducer.close()
        self._content = _Content(self._reducer._call.skips)

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


# -- what was added ---------------------------------------------------------------------------------------------------

_MOST_ROWS, _MOST_NUMBERS = 2_048, 16_384  # of one structure, before they are folded
_MOST_STRUCTURES = 8  # with rows; where there are more, the rows of the oldest are folded
_MOST_PENDING = 4_096  # adds whose copies have not reached the host; from here on the oldest is waited for

# For each slot: what is added up, and the smallest value (of a maximum the negated one).
_SUM, _WEIGHT, _NONFINITE, _SEEN, _LEAST = range(5)


class _Rows:
    """The adds of one structure until they are folded, a row for each.

    ``has_sums``: ``sums`` holds sums; otherwise values, which are multiplied by their weights when they are folded.
    """

    def __init__(self, structure: Structure, slots: list[int], has_sums: bool) -> None:
        self.has_sums = has_sums
        self.sums: list[array[float]] = []
        self.weights: list[float | array[float]] = []
        self.width = len(slots)
        self.limit = max(1, min(_MOST_ROWS, _MOST_NUMBERS // max(1, self.width)))
        self.slots = torch.tensor(slots, dtype=torch.int64, device="cpu")
        # 1 for a minimum, -1 for a maximum, 0 for what is added up.
        signs = [{"min": 1.0, "max": -1.0}.get(op.over, 0.0) for op in structure.ops]
        self.signs = torch.tensor(signs, dtype=torch.float64, device="cpu") if any(signs) else None

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums and weights [adds, leaves]."""
        sums, weights = self._matrix(self.sums), self.weights
        try:
            matrix = as_tensor(array("d", weights)).unsqueeze(1).expand_as(sums)  # type: ignore[arg-type]
        except TypeError:  # some rows have a weight for each leaf
            each = [array("d", [weight]) * self.width if isinstance(weight, float) else weight for weight in weights]
            matrix = self._matrix(each)
        return (sums if self.has_sums else sums * matrix), matrix

    def _matrix(self, rows: list[array[float]]) -> torch.Tensor:
        return torch.frombuffer(bytearray().join(rows), dtype=torch.float64).view(-1, self.width)


class _LastAdd(NamedTuple):
    """The last add, a flat dict in host memory: another one of these is recognised by its keys and types."""

    keys: list[str]
    types: list[type]
    may_be_off_host: bool
    plan: Plan
    rows: _Rows


class _Content:
    """Everything that was added since the last flush, in memory for each path, not for each add.

    1. Each leaf has a slot. An add is read into one row of numbers. One with leaves on a device is read once its copy
       has reached the host, at a later add or at the flush.
    2. Some rows later they are stacked and folded into the lanes, slot by slot.
    3. `part` makes one rank's part of a reduction of the lanes.
    """

    def __init__(self, skip: bool) -> None:
        """``skip``: what is not finite is left out, and only counted."""
        self.adds = 0
        self.structure: Structure | None = None  # of the flush before; of all adds, once it is flushed
        self.is_flushed, self.per_rank = False, False
        self._skip = skip
        self._total = 0.0
        self._slot_of: dict[LeafKey, int] = {}
        self._tags: dict[Tag, None] = {}
        self._sorts: dict[Path, str] = {}
        self._structures: dict[Structure, None] = {}  # those that are known to fit
        self._rows: dict[tuple[Structure, bool], _Rows] = {}
        self._recent: _LastAdd | None = None
        self._lanes = _empty_lanes(0)
        self._pending: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()  # has it arrived; read it
        self._failure: Failure | None = None  # what only the values on a device show

    # -- adding -------------------------------------------------------------------------------------------------------

    def add_again(self, stats: Any, weight: Any) -> bool:
        """Take one add in host memory that has the keys and types of the add before; False for any other."""
        recent = self._recent
        is_number = type(weight) is float or type(weight) is int  # not by a call: each shows in what an add costs
        if recent is None or type(stats) is not dict or [*stats] != recent.keys or not is_number:
            return False
        leaves = [*stats.values()]
        if [*map(type, leaves)] != recent.types or not LIGHTEST <= weight <= HEAVIEST:
            return False
        if recent.may_be_off_host and accelerator_in_use():
            return False
        weight = float(weight)
        row = recent.plan.read(leaves, weight)
        if row is None:
            return False
        self._append(recent.rows, row[0], row[1])
        self._total += weight
        self.adds += 1
        return True

    def add(self, stats: Any, weight: Any) -> None:
        """Take one add. Raises `InvalidLeaf` and `SchemaConflict`, and then nothing has changed."""
        if self._pending:
            self.read_pending()
        flat = flatten(stats)
        snapshot, self._recent = snapshot_if_off_host(flat, weight), None
        if snapshot is None:
            row = read_row(flat, weight)
            rows = self._take(flat.structure, row)
            is_flat = type(stats) is dict and len(stats) == len(flat.leaves) and {*map(type, stats)} == {str}
            if is_flat and not rows.has_sums:
                types = [*map(type, flat.leaves)]
                self._recent = _LastAdd([*stats], types, not NUMBERS.issuperset(types), plan_of(flat), rows)
        else:
            snapshot.check()
            self._learn(flat.structure)
            self._pending.append((snapshot.is_ready, lambda: self._take(flat.structure, read_row(*snapshot.wait()))))
        self.adds += 1

    def add_time(self, name: str, seconds: float, start_event: Any = None, end_event: Any = None) -> None:
        """Take one use of a part of the step that is timed; it is not one of the adds.

        With events it is read once the device has reached its end.
        """
        flat = flatten({"time": {name: Mean(seconds, 1.0)}})
        if end_event is None:
            self._take(flat.structure, read_row(flat, 0.0))
            return
        self._learn(flat.structure)

        def read() -> None:
            self.add_time(name, max(seconds, seconds_between(start_event, end_event)))

        self._pending.append((end_event.query, read))
        self.read_pending()

    def read_pending(self, wait: bool = False) -> None:
        """Read what has arrived from the devices by now; ``wait``: everything. What is wrong the flush reports."""
        if not wait and is_capturing():  # the device may not be asked then
            return
        while self._pending:
            has_arrived, read = self._pending[0]
            try:
                if not wait and len(self._pending) <= _MOST_PENDING and not has_arrived():
                    return
                read()
            except Exception as error:  # a device's, too
                self._failure = self._failure or failure_of(error, "what was added cannot be read")
            self._pending.popleft()

    def _take(self, structure: Structure, row: Row) -> _Rows:
        self._learn(structure)
        values, weights, total, _, sums = row
        key = structure, sums is not None
        rows = self._rows.get(key)
        if rows is None:
            if len(self._rows) >= _MOST_STRUCTURES:
                self._fold(self._rows.pop(next(iter(self._rows))))
                self._recent = None
            rows = self._rows[key] = _Rows(structure, [self._slot_of[leaf] for leaf in structure.leaves], key[1])
        self._append(rows, values if sums is None else sums, weights)
        self._total += total
        return rows

    def _append(self, rows: _Rows, sums: array[float], weights: float | array[float]) -> None:
        if len(rows.sums) >= rows.limit:
            self._fold(rows)
        if rows.width:
            rows.sums.append(sums)
            rows.weights.append(weights)

    def _learn(self, structure: Structure) -> None:
        """Give each leaf a slot. Raises `SchemaConflict` if the structure does not fit the earlier ones."""
        if structure in self._structures:
            return
        sorts = sorts_of(structure)
        conflicts = [path for path, sort in sorts.items() if self._sorts.get(path, sort) != sort]
        if conflicts:
            raise self._conflict(structure, conflicts)
        self._sorts.update(sorts)
        for leaf in structure.leaves:
            self._slot_of.setdefault(leaf, len(self._slot_of))
        self._tags.update(dict.fromkeys(structure.tags))
        if len(self._structures) >= _MOST_STRUCTURES:
            self._structures.pop(next(iter(self._structures)))
        self._structures[structure] = None

    def _conflict(self, structure: Structure, conflicts: list[Path]) -> SchemaConflict:
        path, earlier = conflicts[0], self._all_adds()
        more = f" (and at {len(conflicts) - 1} more paths)" if len(conflicts) > 1 else ""
        return SchemaConflict(
            f"stats that do not fit the earlier ones of this window at {format_path(path)!r}{more}: "
            f"{describe(earlier, path)} before, {describe(structure, path)} now.\n"
            "Give each path one structure and one reduce op, or use different keys. Nothing was added; the window goes "
            "on working.",
            path=format_path(path) or None,
        )

    def _fold(self, rows: _Rows) -> None:
        """Add the rows to the lanes."""
        if not rows.sums:
            return
        refuse_without_values("StatsWindow.add")  # what is folded then would have no values
        with torch.inference_mode():
            missing = len(self._slot_of) - self._lanes.shape[1]
            if missing:
                self._lanes = torch.cat([self._lanes, _empty_lanes(missing)], 1)
            sums, weights = rows.matrices()
            finite = sums.isfinite()
            counted = finite if self._skip else torch.ones_like(finite)
            added = sums.where(counted, 0.0)
            if rows.signs is not None:
                is_extreme = counted & (rows.signs != 0) & ~sums.isnan()
                least = (sums * rows.signs).where(is_extreme, math.inf).amin(0)
                added = added.where(~is_extreme, 0.0)
            lanes = [added, weights.where(counted, 0.0), ~finite, counted]
            self._lanes[:_LEAST].index_add_(1, rows.slots, torch.stack([lane.sum(0).to(sums) for lane in lanes]))
            if rows.signs is not None:
                self._lanes[_LEAST, rows.slots] = torch.minimum(self._lanes[_LEAST, rows.slots], least)
            rows.sums, rows.weights = [], []

    def fold_all(self) -> None:
        """Fold all rows: an add of a structure that was there begins with an empty row again."""
        for rows in self._rows.values():
            self._fold(rows)
        self._rows.clear()
        self._recent = None

    # -- flushing -----------------------------------------------------------------------------------------------------

    def has_arrived(self) -> bool:
        """Return whether `part` would wait for no device. Never raises."""
        self.read_pending()
        return not self._pending or is_capturing()

    def part(self) -> Part | Failure:
        """Return this rank's part of one reduction. Waits for the devices; never raises: this rank must take part."""
        self.is_flushed = True
        try:
            return self._part()
        except Exception as error:
            return failure_of(error, "what was added cannot be read")

    def _part(self) -> Part | Failure:
        self.read_pending(wait=True)
        self.fold_all()
        if self._failure is not None:
            return self._failure
        structure = self.structure = self._all_adds()
        columns = self._lanes.t().tolist()
        sums, weights, nonfinite = array("d"), array("d"), []
        for index, leaf in enumerate(structure.leaves):
            op, column = OPS[leaf[1]], columns[self._slot_of[leaf]]
            value = column[_SUM]
            if op.over != "sum" and not math.isnan(value):
                value = column[_LEAST] if op.over == "min" else -column[_LEAST]
            if column[_NONFINITE]:
                if not column[_SEEN]:
                    value = math.nan  # nothing of it counts
                elif math.isfinite(value):
                    nonfinite.append(index)
            sums.append(value if column[_SEEN] or column[_NONFINITE] else 0.0)
            weights.append(column[_WEIGHT])
        values = None
        if self.per_rank:
            finished = zip(structure.ops, sums, weights, strict=True)
            values = array("d", [op.finish(value, weight) if weight else math.nan for op, value, weight in finished])
        has_one_weight = all(weight == self._total for weight in weights)
        return Part(
            structure,
            sums,
            self._total if has_one_weight else weights,
            self._total,
            all(map(math.isfinite, sums)),
            values,
            tuple(nonfinite),
        )

    def _all_adds(self) -> Structure:
        """Return one structure of all adds: that of an add, or of the last flush, where it is equal."""
        leaves = tuple(key for key in self._slot_of if key[1] != NONE.name or key[0] not in self._sorts)
        kinds: dict[Path, str] = {}
        for path, tag in self._tags:
            kinds[path] = LIST if kinds.get(path, tag) != tag else tag
        tags = tuple(kinds.items())
        for structure in (*self._structures, self.structure):
            if structure is not None and structure.leaves == leaves and structure.tags == tags:
                return structure
        return Structure(leaves, tags)


def _empty_lanes(count: int) -> torch.Tensor:
    lanes = torch.zeros(_LEAST + 1, count, dtype=torch.float64, device="cpu")
    lanes[_LEAST] = math.inf
    return lanes


def _call_site() -> str:
    """Return the line of the program that called us, as a line of a message."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, _DYNAMO, contextlib.__file__)):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"Called at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}.\n"
