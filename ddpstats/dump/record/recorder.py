"""`Recorder` records one step: names and numbers of calls, and entries in the order in which they end.

1. An entry gets its name when it begins, and the selection is asked then. Inputs are measured before the call, which
   may overwrite them, outputs after it.
2. An entry is written when all of it is known. Entries are in the order in which calls end: a function before the
   module that it is in, so that the first entry that shows something is the innermost.
3. Where numbers are still on a device, entries queue up until `_BATCH` leaves wait there; these are then read together.
   An asynchronous step reads nothing, and writes nothing, before `pause`.
4. A program makes its calls at the same few lines over and over: the text of a stack is made once.

Whatever goes wrong is noted, and reported once, by `StatsDump.step` or as the process ends. The program goes on.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from ddpstats._base.files import make_private_directory
from ddpstats._observe.frames import step_frames
from ddpstats._observe.torch_compat import in_backward, no_dispatch_no_grad
from ddpstats.dump.config import ALL_MODES, DumpConfig, DumpSelection, pattern_of
from ddpstats.dump.msprobe import COLLECTIVE, ERRORS, TENSORS
from ddpstats.dump.record.leaves import TensorSummaries
from ddpstats.dump.writer import StepWriter, TensorFiles

_BATCH = 256
_MOST_FRAMES = 200
_MOST_PROBLEMS = 1_000
_EARLY_STOP = "_StopRecomputationError"  # activation checkpointing has what it wants: nothing failed


@dataclass(slots=True)
class OpenEntry:
    """An entry that is not complete yet, inside the passes ``parents``. ``raw`` is what is written."""

    name: str
    raw: dict[str, Any]
    stack: int
    parents: Sequence[str]
    is_wanted: bool


class Recorder:
    """Records one step of one rank.

    Args:
        config: what is wanted.
        directory: of this step and rank.

    Attributes:
        parents: names of the forward passes of modules that are running, innermost last.
        lock: around everything that changes this object; backward passes have threads of their own on a device.
        poll: called at every entry: collectives that have ended meanwhile are noticed then.
        is_active: False from `pause` to `resume`: what is left in a graph does nothing then.
        creates_graph: whether the backward pass that runs makes a graph itself, as far as hooks have seen.
        unfinished: what holds entries that are not complete; `pause` calls their ``flush``.
    """

    def __init__(self, config: DumpConfig, directory: Path) -> None:
        self.config = config
        self.directory = directory
        self.parents: list[str] = []
        self.lock = threading.RLock()
        self.is_active = True
        self.poll: Callable[[], None] | None = None
        self.creates_graph = False
        self.unfinished: dict[Any, None] = {}
        self.wants_input, self.wants_output = "input" in config.data_mode, "output" in config.data_mode
        self.wants_backward = "backward" in config.data_mode
        self._selection = DumpSelection(config)
        self._counts: Counter[object] = Counter()
        self._stacks: dict[tuple[tuple[int, int], ...], int] = {}
        self._codes: list[CodeType] = []  # of these stacks, so that their ids are not given again
        self._queue: list[OpenEntry] = []
        self._problems: list[str] = []
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

    # -- entries ------------------------------------------------------------------------------------------------------

    def next_number(self, what: object) -> int:
        """Return the number of this call of ``what`` in the step, from 0."""
        with self.lock:
            self._counts[what] += 1
            return self._counts[what] - 1

    def open(self, name: str, raw: dict[str, Any], parents: Sequence[str], stack: int | None = None) -> OpenEntry:
        """Begin an entry inside the passes ``parents``, which is called from here unless there is a ``stack``."""
        is_wanted = self.is_active and self._selection.wants(name, parents)
        number = self._stack_number() if stack is None else stack
        return OpenEntry(name, raw, number, list(parents), is_wanted)

    def begin(
        self, name: str, args: Any, kwargs: Mapping[str, Any], parameters: Mapping[str, Any] | None = None
    ) -> OpenEntry:
        """Begin the entry of a call that is about to run; a module has its own parameters."""
        self._poll()  # the call may overwrite what a collective has made
        is_recompute = in_backward() and torch.is_grad_enabled() and not self.creates_graph
        with self.lock, no_dispatch_no_grad():
            entry = self.open(name, {"input_args": [], "input_kwargs": {}, "output": []}, self.parents)
            if is_recompute:
                entry.raw["is_recompute"] = True
            if entry.is_wanted and self.wants_input:
                leaves = self.leaves_of(name)
                entry.raw["input_args"] = leaves.of(args, "input")
                entry.raw["input_kwargs"] = leaves.of(kwargs, "input_kwargs")
                if parameters is not None:
                    entry.raw["parameters"] = leaves.of(parameters, "parameters")
        return entry

    def end(self, entry: OpenEntry, result: Any) -> None:
        """Write the entry of a call that is over: what it returns is the last that is to be known."""
        if entry.is_wanted and self.wants_output:
            is_several = isinstance(result, (list, tuple))
            with self.lock, no_dispatch_no_grad():
                leaves = self.leaves_of(entry.name).of(result, "output" if is_several else "output.0")
            entry.raw["output"] = leaves if is_several else [leaves]
        self.write(entry)

    def fail(self, entry: OpenEntry, error: BaseException) -> None:
        """Write the entry of a call that has raised: what went in is of interest all the more."""
        kind = type(error).__name__
        if kind != _EARLY_STOP:
            entry.raw["raised"] = kind
        self.write(entry)

    def write(self, entry: OpenEntry) -> None:
        """Write an entry of which all is known, up to numbers that are on a device."""
        self._poll()
        with self.lock:
            if not (self.is_active and entry.is_wanted):
                return
            if not self.leaves.entry_fits(entry.name):  # its name, its stack and its parent stay
                is_collective = entry.name.startswith(COLLECTIVE)
                for key, value in entry.raw.items():
                    if isinstance(value, (list, dict)) and not (is_collective and key == "input_kwargs"):
                        value.clear()
                entry.raw["dropped"] = True
            self._queue.append(entry)
            if not self.config.async_dump and not 0 < self.leaves.deferred_count < _BATCH:
                self._drain()

    def _poll(self) -> None:
        if self.poll is not None:
            self.poll()

    def _drain(self) -> None:
        """Write the entries of the queue. An error of the device costs numbers, and no entry."""
        if self.leaves.deferred_count:
            with self.safely("reading the device"), no_dispatch_no_grad():
                self.leaves.read_devices()
        queue, self._queue = self._queue, []
        for entry in queue:
            with self.safely(entry.name):
                self._writer.add(entry.name, entry.raw, entry.stack, entry.parents[-1] if entry.parents else None)
            entry.raw = {}  # the graph holds the entry, until it is freed

    def _stack_number(self) -> int:
        """Return the number of the program's frames here, innermost first."""
        frames = list(islice(step_frames(), _MOST_FRAMES))
        key = tuple([(id(frame.f_code), frame.f_lasti) for frame in frames])
        if key not in self._stacks:
            self._codes += [frame.f_code for frame in frames]
            self._stacks[key] = self._writer.new_stack([_text_of(frame) for frame in frames])
        return self._stacks[key]

    # -- the end ------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Record nothing until `resume`. What was recorded is on the disk then, a line per entry."""
        with self.lock:
            for holder in list(self.unfinished):
                with self.safely("what was not complete"), no_dispatch_no_grad():
                    holder.flush()
            self.unfinished.clear()
            with self.safely("entries"):
                self._drain()
            self.is_active = False
            self.parents.clear()
            with self.safely(str(self.directory)):
                self._files.flush()
            self.leaves.release()

    def resume(self) -> None:
        """Go on with the step."""
        self.is_active = True

    def finish(self) -> None:
        """Put the files in place of the lines, after `pause`."""
        with self.safely(str(self.directory)):
            self._writer.finish()

    def forget(self) -> None:
        """Drop everything, in a process that was forked from the one that records."""
        self.is_active = False
        self.poll = None
        self.lock = threading.RLock()  # another thread may have held it
        self.unfinished.clear()
        self._queue.clear()
        self._writer.close()

    # -- what went wrong ----------------------------------------------------------------------------------------------

    def safely(self, where: str) -> _Safely:
        """Return a context that notes an error of the dump, which must not reach the program."""
        return _Safely(self, where)

    def note_error(self, where: str, error: BaseException) -> None:
        """Note an error of the dump."""
        self.note(where, "".join(traceback.format_exception(error)).strip())

    def note(self, where: str, text: str) -> None:
        """Note something that could not be recorded."""
        if len(self._problems) < _MOST_PROBLEMS:
            self._problems.append(f"{where}: {text}")

    def warn(self) -> None:
        """Write the log of the step, and warn of it and of choices that matched nothing. Raises where warnings do."""
        sentences = self._selection.problems()
        if self.leaves.first_dropped is not None:
            sentences.append(
                f"the dump of this step needs more than async_max_bytes, {self.config.async_max_bytes:,} bytes: from "
                f"{self.leaves.first_dropped} on, entries have no numbers. Choose fewer by list or scope, or set "
                "async_max_bytes higher."
            )
        if self._problems:
            log, first = self.directory / ERRORS, self._problems[0]
            with contextlib.suppress(OSError):
                make_private_directory(self.directory)
                log.write_text("\n".join(self._problems) + "\n", encoding="utf-8")
            count = len(self._problems)
            sentences.insert(0, f"{count} part(s) of the dump could not be collected; see {log}. The first: {first}")
        for sentence in sentences:
            warnings.warn(f"ddpstats: {sentence}", stacklevel=4)


class _Safely:
    """Notes an error of the dump; it is around every hook, where a generator would take three times as long."""

    __slots__ = ("_recorder", "_where")

    def __init__(self, recorder: Recorder, where: str) -> None:
        self._recorder, self._where = recorder, where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self._recorder.note_error(self._where, error)
            return True
        return False


def _text_of(frame: FrameType) -> str:
    file, line = frame.f_code.co_filename, frame.f_lineno
    if not file.startswith("<"):  # as "<frozen runpy>" does, which is no file
        file = os.path.abspath(file)
    return f"File {file}, line {line}, in {frame.f_code.co_name},\n    {linecache.getline(file, line).strip()}"
