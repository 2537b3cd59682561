"""One rank's flight record as it is written: its collectives, what other parts of ddpstats find, and what it does now.

A record begins as soon as it is known whose it is, which may be before the first collective: a program may issue none
but our own reductions. What is found before there is a process group waits in `Recording`.

What `ddpstats watch` shows besides collectives are lines that are written when it changes: ``{"now": {...}}``, with
the steps of the optimizer, since when the rank waits, new keys, keys that it holds no more, and alarms.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpstats._base import marks
from ddpstats._base.files import require_regular
from ddpstats._base.marks import VALUES, Mark
from ddpstats._base.text import shorten
from ddpstats._ranks.failure import ProcessId
from ddpstats._ranks.store import STORE_ERRORS
from ddpstats.errors import ConfigError, DdpstatsError
from ddpstats.guard.event import Event
from ddpstats.guard.record import FORMAT, MAX_BYTES, MAX_LINE_BYTES, mark_as_dict, parsed, raw_lines

if TYPE_CHECKING:
    from ddpstats._reduction.flatten import Structure
    from ddpstats._reduction.layout import Layout

LONG_WAIT_SEC = 2.0  # a shorter wait is how ranks meet, and is not recorded
ROUNDS = 4  # a key that a rank held before, and in none of so many calls of its name, it has stopped holding
_MOST_EARLY_MARKS = 1000
_TRIES = 3  # at a store that does not answer at once
_SHOWN_KEYS = 5
_MOST_NAMES = 8  # of reductions that lack keys: the newest
_MOST_SITES = 1024  # of reductions
_TEXT_CHARS = 1000

log = logging.getLogger("ddpstats")


class Identity(NamedTuple):
    """Whose record it is. ``run`` is the same on all ranks of a program, and no other's."""

    run: str
    rank: int
    world_size: int


class RecordWriter:
    """One rank's events as JSON lines, whole up to the last one even if the process is killed.

    Two files take turns, ``rank3.jsonl`` and the older ``rank3.old.jsonl``, so a record is bounded by ``max_bytes`` and
    never holds less than half of that. Every line is one `write` to the kernel. Each new file begins with what the one
    before it, which is deleted some day, said of the groups and of the rank's state.
    """

    def __init__(
        self, directory: str | Path, rank: int, world_size: int, run: str = "", max_bytes: int = MAX_BYTES
    ) -> None:
        """``run``: the same on all ranks of a program, and no other's. Its next guard goes on in the same file."""
        self._path = Path(directory) / f"rank{rank}.jsonl"
        self._limit = max_bytes // 2
        self._turn = threading.RLock()  # a mark may come from another thread than the collectives do
        self._groups: dict[str, bytes] = {}  # the lines that describe them
        self._now: dict[str, Any] = {}
        process = ProcessId.mine().pack().hex()
        self._head = {"ddpstats": FORMAT, "run": run, "rank": rank, "world_size": world_size, "process": process}
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
        self.write(event.as_dict())

    def write_mark(self, mark: Mark) -> None:
        """Append what another part of ddpstats found, if that is one line that can be read again."""
        line = _line_of(mark_as_dict(mark))
        if len(line) <= MAX_LINE_BYTES:
            self._append(line)

    def write_now(self, changes: Mapping[str, Any]) -> None:
        """Append what has changed of the rank's state."""
        with self._turn:
            self._now.update(changes)
            self._append(_line_of({"now": changes}))

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one line. A disk that is full stops the record, not the training."""
        line = _line_of(entry)
        with self._turn:
            self._append(line)
            if "new_group" in entry:
                self._keep(entry["new_group"], line)

    def _keep(self, group: str, line: bytes) -> None:
        """Keep who belongs to a group: nothing compares what ranks did there without that."""
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
        """Return whether the same program began the file that exists."""
        try:
            return bool(run) and parsed(next(raw_lines(self._path))[1]).get("run") == run
        except (OSError, ValueError, StopIteration):
            return False

    def _open(self, goes_on: bool) -> int:
        # Others may write to the directory: a link of theirs must not lead elsewhere, and a pipe must not block.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = require_regular(os.open(self._path, flags, 0o600), self._path)
        if not goes_on:
            os.ftruncate(file, 0)
        head = (json.dumps({**self._head, "time": time.time()}) + "\n").encode()
        now = _line_of({"now": self._now}) if self._now else b""
        os.write(file, head + b"".join(self._groups.values()) + now)
        self._size = os.fstat(file).st_size
        return file

    def _old_path(self) -> Path:
        return self._path.with_suffix(".old.jsonl")

    def close(self) -> None:
        """End the record. Idempotent."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)


def _line_of(entry: Mapping[str, Any]) -> bytes:
    return (json.dumps(entry, separators=(",", ":")) + "\n").encode("utf-8", "surrogateescape")


class HeldKeys:
    """The structures that this rank held in the calls of one name.

    Structures and layouts are compared by identity; names only where these differ.
    """

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
    """The record of one guard. ``writer`` is None before it begins, and where no ``directory`` is given.

    ``identify`` asks whose record it is: None while there is no process group. Raises what the store raises.
    """

    def __init__(self, directory: str | Path | None, identify: Callable[[], Identity | None] = lambda: None) -> None:
        self._directory, self._identify = directory, identify
        self.writer: RecordWriter | None = None
        self._early: deque[Mark] = deque(maxlen=_MOST_EARLY_MARKS)
        self._tries = _TRIES
        self._turn = threading.RLock()  # a mark may come from another thread than the first collective
        self._now: dict[str, Any] = {}
        self._steps: dict[int, int] = {}  # of each optimizer
        self._held: dict[tuple[str, str, str | None], HeldKeys] = {}  # by the site of a reduction
        self._not_held: dict[str | None, str] = {}  # name of a reduction -> keys
        self._renegotiations = 0

    def subscribe(self) -> None:
        """Record from now on what other parts of ddpstats publish."""
        if self._directory is not None:
            marks.listeners.append(self._take)
            marks.key_listeners.append(self)

    def begin(self, identity: Identity) -> None:
        """Open the file, unless it is open. Raises `ConfigError` where nothing can be written."""
        with self._turn:
            if self._directory is None or self.writer is not None:
                return
            self.writer = RecordWriter(self._directory, identity.rank, identity.world_size, identity.run)
            if self._now:
                self.writer.write_now(self._now)
            while self._early:
                self.writer.write_mark(self._early.popleft())

    def begin_early(self) -> None:
        """`begin` before the guard has connected: where the ranks are known, and the store answers. Raises nothing."""
        if self._directory is None or self.writer is not None or not self._tries:
            return
        try:
            identity = self._identify()
            if identity is not None:
                self.begin(identity)
        except (DdpstatsError, *STORE_ERRORS) as error:
            self._tries -= 1
            if not self._tries:
                log.warning("no record is written before the first collective: %s", error)

    def close(self) -> None:
        """Stop recording. Local and idempotent; also in a process that was forked from the recorded one."""
        with suppress(ValueError):
            marks.listeners.remove(self._take)
        with suppress(ValueError):
            marks.key_listeners.remove(self)
        if self.writer is not None:
            self.writer.close()

    # -- the rank's state ---------------------------------------------------------------------------------------------

    def note(self, **changes: Any) -> None:
        """Record what has changed of the rank's state."""
        with self._turn:
            self._now.update(changes)
            if self.writer is not None:
                self.writer.write_now(changes)

    def step(self, optimizer: object) -> None:
        """Count a step of an optimizer; the one with the most steps counts."""
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps > self._now.get("steps", 0):
            self.note(steps=steps)

    def wait(self, since: float | None) -> None:
        """Record a wait for other ranks once it is a long one, and its end (None)."""
        is_long = since is not None and time.time() - since > LONG_WAIT_SEC
        waits_since = since if is_long else None
        if waits_since != self._now.get("waits_since"):
            self.note(waits_since=waits_since)

    def alarm(self, kind: str, message: str) -> None:
        """Record that something is wrong; of each kind the last message counts."""
        self.note(**{f"ALARM of {kind}": " ".join(message.split())[:_TEXT_CHARS]})

    def _take(self, mark: Mark) -> None:
        with self._turn:
            self.begin_early()
            if self.writer is None:
                self._early.append(mark)
            else:
                self.writer.write_mark(mark)
            if mark.kind != VALUES:
                self.alarm(mark.kind, mark.text)

    def renegotiated(self, name: str | None, new_keys: Sequence[str]) -> None:
        """Record that the ranks have exchanged what they hold in a reduction of that name."""
        self._renegotiations += 1
        text = f"{self._renegotiations}; new keys of the last: {_some(new_keys) or 'none'} (name={name!r})"
        self.note(renegotiations=text[:_TEXT_CHARS])

    def reduced(self, site: tuple[str, str, str | None], structure: Structure, layout: Layout) -> None:
        """Take one call of a reduction, and what this rank held in it."""
        if len(self._held) > _MOST_SITES:
            self._held.clear()
        keys = self._held.setdefault(site, HeldKeys()).take(structure, layout)
        if keys is None:
            return
        name = site[2]
        self._not_held.pop(name, None)
        if keys:
            self._not_held[name] = f"{_some(keys)} (name={name!r})"
        if len(self._not_held) > _MOST_NAMES:
            del self._not_held[next(iter(self._not_held))]
        self.note(**{"not held any more": "; ".join(self._not_held.values())[:_TEXT_CHARS]})


def _some(keys: Sequence[str]) -> str:
    return shorten(map(repr, keys), _SHOWN_KEYS)
