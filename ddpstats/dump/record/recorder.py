"""What is collected of one step: names and numbers of calls, entries in the order in which they end, and their files.

1. A call gets its name when it begins, and the selection is asked then.
2. An entry is written when all of it is known. Entries stand in the order in which calls end: a function before the
   module that it is in, so that the first entry that shows something is the innermost.
3. Where numbers are still on a device, entries queue up until `_BATCH` leaves wait there; these are then read together.
   An asynchronous step reads nothing, and writes nothing, before `pause`.

Whatever goes wrong in here is noted, and told once at the end of the step; the program goes on.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpstats._base.files import make_private_directory
from ddpstats._observe.torch_compat import graph_task, in_backward, no_dispatch_no_grad
from ddpstats.dump.config import ALL_MODES, DumpConfig, DumpSelection, pattern_of
from ddpstats.dump.msprobe import ERRORS, TENSORS, backward_of
from ddpstats.dump.record.leaves import TensorSummaries
from ddpstats.dump.record.stacks import StackBook
from ddpstats.dump.writer import StepWriter, TensorFiles

_BATCH = 256
_ENOUGH = "_StopRecomputationError"  # activation checkpointing has what it wants, and leaves: nothing failed


@dataclass(slots=True)
class OpenEntry:
    """One entry, while it is made. ``raw`` is what is written."""

    name: str
    raw: dict[str, Any]
    stack: int
    parent: str | None


class Recorder:
    """Collects one step of one rank.

    Args:
        config: what is wanted.
        directory: of this step and rank.

    Attributes:
        parents: names of the forward passes of modules that are running, innermost last.
        lock: around everything that changes this object; backward passes have threads of their own on a device.
        poll: called at every entry: collectives that have ended meanwhile are noticed then.
        is_active: False once the step has ended: what is left in a graph does nothing then.
        silent: functions that return no tensor, as this step has shown: what another step did changes no name.
        creates_graph: the backward pass that runs, as far as it is seen to begin, makes a graph of its own.
        note, note_error: see `Problems`; stack: `StackBook.here`; leaves_of: `TensorSummaries.of_entry`.
        on_backward: called when something is seen of a backward pass that was not seen before.
    """

    def __init__(self, config: DumpConfig, directory: Path) -> None:
        self.config = config
        self.directory = directory
        self.parents: list[str] = []
        self.lock = threading.RLock()
        self.is_active = True
        self.poll: Callable[[], None] | None = None
        self.silent: set[str] = set()
        self.creates_graph = False
        self.on_backward: Callable[[], None] | None = None
        self._task = -1
        self._counts: Counter[object] = Counter()
        self.wants_input, self.wants_output = "input" in config.data_mode, "output" in config.data_mode
        self.wants_backward = "backward" in config.data_mode
        self._selection = DumpSelection(config)
        self._ask_late = config.scope is not None
        self._queue: list[OpenEntry] = []
        self._open: dict[int, Any] = {}  # of backward passes and parameters' gradients that have begun
        self._problems = Problems(directory)
        self.note, self.note_error = self._problems.note, self._problems.note_error
        self._tensor_names = [pattern_of(part) for part in config.tensor_names]
        saves = bool(config.task == "tensor" or config.tensor_names)
        data_dir = directory / TENSORS
        header = {
            "task": config.task,
            "level": config.level,
            "dump_data_dir": str(data_dir.absolute()) if saves else None,
            "scope": list(config.scope or ()),
            "list": list(config.names),
            "data_mode": sorted(config.data_mode) if len(config.data_mode) < len(ALL_MODES) else ["all"],
        }
        self._writer = StepWriter(directory, header)
        if not config.async_dump:
            self._writer.open()
        self.stack = StackBook(self._writer.new_stack).here
        self._files = TensorFiles(data_dir, at_once=not config.async_dump)
        self.leaves = TensorSummaries(
            md5=config.summary_mode == "md5",
            files=self._files,
            saves=self._saves,
            max_bytes=config.async_max_bytes if config.async_dump else None,
            note_error=self.note_error,
        )
        self.leaves_of = self.leaves.of_entry

    def _saves(self, name: str) -> bool:
        return self.config.task == "tensor" or any(part.search(name) for part in self._tensor_names)

    def number(self, what: object) -> int:
        """Of a call that begins: how often this was called since the step began, in whatever piece of it."""
        self._counts[what] += 1
        return self._counts[what] - 1

    # -- what is wanted, and where it is ------------------------------------------------------------------------------

    def wants(self, name: str) -> bool:
        """Whether an entry of the forward pass is collected. Asked once, as the call begins."""
        return self._selection.wants(name, self.parents)

    def may_want_backward(self, name: str, parents: Sequence[str]) -> bool:
        """Whether to look at the backward pass at all: where the order decides, that is known when it comes."""
        return self.wants_backward and (self._ask_late or self.wants_gradients(name, parents))

    def wants_backward_now(self, name: str, parents: Sequence[str]) -> bool:
        return not self._ask_late or self.wants_gradients(name, parents)

    def wants_gradients(self, name: str, inside: Sequence[str]) -> bool:
        """Of parameters of a module, asked as the first of them comes; its forward pass was the last of ``inside``."""
        return self._selection.wants(name, [backward_of(one) for one in inside])

    def entry(self, name: str) -> OpenEntry:
        """An empty one, of the forward pass, that is called from here."""
        raw: dict[str, Any] = {"input_args": [], "input_kwargs": {}, "output": []}
        if in_backward() and torch.is_grad_enabled() and not self.creates_graph:
            raw["is_recompute"] = True
        return OpenEntry(name, raw, self.stack(), self.parents[-1] if self.parents else None)

    def backward_runs(self) -> None:
        """From hooks in a backward pass."""
        task = graph_task()
        if task != self._task:
            self._task = task
            if self.on_backward is not None:
                self.on_backward()

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, entry: OpenEntry) -> None:
        """All of it is known, up to numbers that are on a device."""
        if self.poll is not None:
            self.poll()
        with self.lock:
            if not self.is_active:
                return
            if not self.leaves.entry_fits(entry.name):
                _empty(entry)
            if self.config.async_dump or self.leaves.waiting:
                self._queue.append(entry)
                if not self.config.async_dump and self.leaves.waiting >= _BATCH:
                    self._drain()
            else:
                self._drain()
                self._add(entry)

    def write_with_output(self, entry: OpenEntry, result: Any) -> None:
        """The call is over: what it returns is the last that is to be known."""
        if self.wants_output:
            is_several = isinstance(result, (list, tuple))
            with no_dispatch_no_grad():
                found = self.leaves_of(entry.name).of(result, "output" if is_several else "output.0")
            entry.raw["output"] = found if is_several else [found]
        self.write(entry)

    def write_failed(self, entry: OpenEntry, error: BaseException) -> None:
        """The call has raised: what went in is of interest all the more."""
        kind = type(error).__name__
        if kind != _ENOUGH:
            entry.raw["raised"] = kind
        self.write(entry)

    def opened(self, key: int, what: Any) -> None:
        """``what.flush()`` is to be called at the end of the step, unless `closed` comes first."""
        self._open[key] = what

    def closed(self, key: int) -> None:
        self._open.pop(key, None)

    def _drain(self) -> None:
        """An error of the device costs numbers, and no entry."""
        if self.leaves.waiting:
            with no_dispatch_no_grad():
                self._problems.safely("reading the device", self.leaves.settle)
        queue, self._queue = self._queue, []
        for entry in queue:
            self._add(entry)

    def _add(self, entry: OpenEntry) -> None:
        try:
            self._writer.add(entry.name, entry.raw, entry.stack, entry.parent)
        except Exception as error:
            self.note_error(entry.name, error)

    # -- the end ------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Record nothing until `resume`. What was recorded is on the disk then, a line per entry."""
        with self.lock:
            for one in list(self._open.values()):
                self._problems.safely("what was not complete", one.flush)
            self._open.clear()
            self._problems.safely("entries", self._drain)
            self.is_active = False
            self.parents.clear()
            self._problems.safely(str(self.directory), self._files.flush)
            self.leaves.release()

    def resume(self) -> None:
        self._task = -1
        self.is_active = True

    def finish(self) -> None:
        """Put the files in place of the lines, after `pause`."""
        self._problems.safely(str(self.directory), self._writer.finish)

    def warn(self) -> None:
        """Report what went wrong. It raises where warnings do."""
        for sentence in self._problems.sentences([*self._dropped(), *self._selection.problems()]):
            warnings.warn(f"ddpstats: {sentence}", stacklevel=4)

    def abandon(self) -> bool:
        """Return whether nothing was recorded. Then nothing is left on the disk."""
        return self._writer.abandon()

    def forget(self) -> None:
        """In a process that was forked from the one that collects: nothing here is this one's."""
        self.is_active = False
        self.poll = self.on_backward = None
        self.lock = threading.RLock()  # another thread may have held it
        self._open.clear()
        self._queue.clear()
        self._writer.close()

    def _dropped(self) -> list[str]:
        first, self.leaves.first_dropped = self.leaves.first_dropped, None
        if first is None:
            return []
        return [
            f"the dump of this step needs more than async_max_bytes, {self.config.async_max_bytes:,} bytes: from "
            f"{first} on, entries have no numbers. Choose fewer by list or scope, or set async_max_bytes higher."
        ]

    # -- collectives --------------------------------------------------------------------------------------------------

    def collective_begins(self, api: str, tensors: Sequence[Tensor], kwargs: Mapping[str, object]) -> OpenEntry | None:
        """A collective is about to run: the numbers of ``tensors`` now. For `collective_ends`; None: unwanted.

        Args:
            api: such as ``all_reduce``.
            kwargs: of plain data; they are written as they are.
        """
        with self.lock, no_dispatch_no_grad():
            what = f"Distributed.{api}"
            name = f"{what}.{self.number(what)}.forward"
            if not self.is_active or not self.wants(name):
                return None
            entry = self.entry(name)
            if self.wants_input:
                entry.raw["input_args"] = self.leaves_of(name).of(list(tensors), "input")
                entry.raw["input_kwargs"] = dict(kwargs)
            return entry

    def collective_ends(self, entry: OpenEntry, outputs: Sequence[Tensor], *, is_incomplete: bool = False) -> None:
        """The collective of ``entry`` has its result in ``outputs``, or never has one: the entry is written."""
        if is_incomplete:
            entry.raw["incomplete"] = True
        with self.lock:
            self.write_with_output(entry, outputs)


def _empty(entry: OpenEntry) -> None:
    """Only its name, its stack and its parent stay."""
    kept = {key: type(value)() if isinstance(value, (list, dict)) else value for key, value in entry.raw.items()}
    entry.raw.clear()
    entry.raw.update(kept)


# -- what went wrong ---------------------------------------------------------------------------------------------------

_MOST_KEPT = 1_000


class Problems:
    """What went wrong in one step: noted as it happens, told when the step's files are written.

    Args:
        directory: of this step and rank; its log has the errors.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: list[str] = []
        self._count = 0
        self._told: set[str] = set()

    def note_error(self, where: str, error: BaseException) -> None:
        """Something of ours failed; the program goes on."""
        self.note(where, "".join(traceback.format_exception(type(error), error, error.__traceback__)).strip())

    def note(self, where: str, text: str) -> None:
        """Something that could not be collected, without an error. All are counted, the first thousand kept."""
        self._count += 1
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(f"{where}: {text}")

    def safely(self, where: str, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:
            self.note_error(where, error)

    def sentences(self, others: Iterable[str]) -> list[str]:
        """What is to be told, errors first; each of ``others`` once for a step. Writes the log."""
        new = [sentence for sentence in others if sentence not in self._told]
        self._told.update(new)
        return [*self._errors(), *new]

    def _errors(self) -> list[str]:
        if not self._count:
            return []
        log = self._directory / ERRORS
        try:
            make_private_directory(self._directory)
            with log.open("a", encoding="utf-8") as file:
                file.write("\n".join(self._kept) + "\n")
            where = f"see {log}"
        except OSError as error:
            where = f"and the log could not be written ({error}); the first: {self._kept[0]}"
        count, self._count, self._kept = self._count, 0, []
        return [f"{count} part(s) of the dump could not be collected; {where}"]
