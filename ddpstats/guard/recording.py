"""When the record of a guard begins: as soon as it is known whose it is, which may be before the first collective.

A program may issue no collective at all but our own reductions, which tell of themselves, as capture and the sentinel
do, by marks. What they tell before there is a process group waits here.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddpstats._base import marks
from ddpstats._base.files import require_regular
from ddpstats._base.marks import Mark
from ddpstats._ranks.store import GLANCE_SEC, STORE_ERRORS
from ddpstats.errors import ConfigError, DdpstatsError
from ddpstats.guard.event import Event, Evidence
from ddpstats.guard.group import run_name
from ddpstats.guard.record import FORMAT, MAX_BYTES, MAX_LINE_BYTES, mark_as_dict, parsed, raw_lines

if TYPE_CHECKING:
    from ddpstats._reduction.flatten import Structure
    from ddpstats._reduction.layout import Layout

_MOST_EARLY_MARKS = 1000
_TRIES = 3  # at a store that does not answer at once

log = logging.getLogger("ddpstats")


class RecordWriter:
    """One rank's events as JSON lines, whole up to the last one even if the process is killed.

    Two files take turns, ``rank3.jsonl`` and the older ``rank3.old.jsonl``, so a record is bounded by ``max_bytes`` and
    never holds less than half of that. Every line is one `write` to the kernel: nothing is kept in this process but the
    descriptions of the groups, which each new file begins with: the one that had them is deleted some day.
    """

    def __init__(
        self, directory: str | Path, rank: int, world_size: int, run: str = "", max_bytes: int = MAX_BYTES
    ) -> None:
        """``run``: the same on all ranks of a program, and no other's. Its next guard goes on in the same file."""
        self._path = Path(directory) / f"rank{rank}.jsonl"
        self._limit = max_bytes // 2
        self._turn = threading.RLock()  # a mark may come from another thread than the collectives do
        self._before: Evidence | None = None  # of the last event
        self._groups: dict[str, bytes] = {}  # the lines that describe them
        self._head = {"ddpstats": FORMAT, "run": run, "rank": rank, "world_size": world_size, "pid": os.getpid()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            goes_on = self._is_of(run)
            if not goes_on:
                self._old_path().unlink(missing_ok=True)
            self._file = self._open(goes_on)
        except OSError as error:
            raise ConfigError(f"rank {rank} cannot write its record to {directory}: {error.strerror}") from None

    def write_event(self, event: Event) -> None:
        """Append one event."""
        with self._turn:
            self.write(event.as_dict(self._before))
            self._before = event.evidence if event.word else self._before

    def write_mark(self, mark: Mark) -> None:
        """Append what another part of ddpstats found, if that is one line that can be read again."""
        line = _line_of(mark_as_dict(mark))
        if len(line) <= MAX_LINE_BYTES:
            self._append(line)

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one line. A disk that is full stops the record, not the training."""
        line = _line_of(entry)
        with self._turn:
            self._append(line)
            if "new_group" in entry:
                self._keep(entry["new_group"], line)

    def _keep(self, group: str, line: bytes) -> None:
        """Who belongs to a group: nothing compares what ranks did there without that."""
        self._groups[group] = line
        while sum(map(len, self._groups.values())) > self._limit // 4:  # a program that makes groups for ever
            del self._groups[next(iter(self._groups))]

    def _append(self, line: bytes) -> None:
        with self._turn:
            if self._file < 0:
                return
            try:
                if self._size + len(line) > self._limit:
                    os.close(self._file)
                    os.replace(self._path, self._old_path())
                    self._file = self._open(False)
                os.write(self._file, line)
                self._size += len(line)
            except OSError:
                self.close()

    def _is_of(self, run: str) -> bool:
        """Whether the file that is there was begun by the same program."""
        try:
            return bool(run) and parsed(next(raw_lines(self._path))[1]).get("run") == run
        except (OSError, ValueError, StopIteration):
            return False

    def _open(self, goes_on: bool) -> int:
        # Others may write to the directory: no link of theirs leads our lines elsewhere, and no pipe holds us up.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = require_regular(os.open(self._path, flags, 0o600), self._path)
        if not goes_on:
            os.ftruncate(file, 0)
        head = (json.dumps({**self._head, "time": time.time()}) + "\n").encode()
        os.write(file, head + b"".join(self._groups.values()))
        self._before = None  # every file can be read by itself
        self._size = os.fstat(file).st_size
        return file

    def _old_path(self) -> Path:
        return self._path.with_suffix(".old.jsonl")

    def close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)


def _line_of(entry: Mapping[str, Any]) -> bytes:
    return (json.dumps(entry, separators=(",", ":")) + "\n").encode("utf-8", "surrogateescape")


ROUNDS = 4
"""A key that a rank held before, and in none of so many calls of its name, it has stopped holding."""


class HeldKeys:
    """The structures that this rank held in the calls of one name. Names are compared only where these differ."""

    def __init__(self) -> None:
        self._calls = 0
        self._held: set[Structure] = set()
        self._before: tuple[set[Structure], Layout] | None = None
        self._ever: set[str] = set()  # as far as the layout still has them
        self._reported: list[str] = []

    def take(self, structure: Structure, layout: Layout) -> list[str] | None:
        """Note one call. Return the keys that this rank has stopped holding, where they differ from those before."""
        self._held.add(structure)
        self._calls += 1
        if self._calls < ROUNDS:
            return None
        held, self._held, self._calls = self._held, set(), 0
        if self._before is not None and self._before[0] == held and self._before[1] is layout:
            return None
        self._before = held, layout
        names = layout.names
        now = {names[layout.slot_of[leaf]] for structure in held for leaf in structure.leaves if leaf in layout.slot_of}
        self._ever = (self._ever | now).intersection(names)
        missing = [path for path in dict.fromkeys(names) if path in self._ever and path not in now]
        if missing == self._reported:
            return None
        self._reported = missing
        return missing


class Recording:
    """Of one guard. ``writer`` is None before it begins, and where no ``directory`` is given."""

    def __init__(self, directory: str | Path | None) -> None:
        self._directory = directory
        self.writer: RecordWriter | None = None
        self._early: deque[Mark] = deque(maxlen=_MOST_EARLY_MARKS)
        self._tries = _TRIES
        self._turn = threading.RLock()  # a mark may come from another thread than the first collective

    def subscribe(self) -> None:
        """Take from now on what other parts tell."""
        if self._directory is not None:
            marks.listeners.append(self._take)

    def stop_listening(self) -> None:
        """Idempotent."""
        with suppress(ValueError):
            marks.listeners.remove(self._take)

    def _take(self, mark: Mark) -> None:
        with self._turn:
            self.begin_early()
            if self.writer is None:
                self._early.append(mark)
            else:
                self.writer.write_mark(mark)

    def begin(self, run: str) -> None:
        """Unless it has begun. Raises `ConfigError` where nothing can be written."""
        with self._turn:
            if self._directory is None or self.writer is not None:
                return
            self.writer = RecordWriter(self._directory, dist.get_rank(), dist.get_world_size(), run)
            while self._early:
                self.writer.write_mark(self._early.popleft())

    def begin_early(self) -> None:
        """`begin` before the guard has connected: where the ranks are known, and the store answers. Raises nothing."""
        if self._directory is None or self.writer is not None or not self._tries or not dist.is_initialized():
            return
        try:
            self.begin(run_name(GLANCE_SEC))
        except (DdpstatsError, *STORE_ERRORS) as error:
            self._tries -= 1
            if not self._tries:
                log.warning("no record is written before the first collective: %s", error)

    def close(self) -> None:
        """Local and idempotent."""
        self.stop_listening()
        if self.writer is not None:
            self.writer.close()
