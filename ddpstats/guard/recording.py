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
from ddpstats.guard.record import FORMAT, MAX_BYTES, MAX_LINE_BYTES, mark_as_dict, parse_line, raw_lines

if TYPE_CHECKING:
    from ddpstats._reduction.flatten import Structure
    from ddpstats._reduction.layout import Layout
    from ddpstats.guard.event import Event, Evidence

LONG_WAIT_SEC = 2.0  # a shorter wait is that of a usual collective, and is not recorded
ROUNDS = 4  # a key that a rank held before, and in none of so many calls of its name, it has stopped holding
_MOST_EARLY_MARKS = 1000
_TRIES = 3  # at a store that does not answer at once
_SHOWN_KEYS = 5
_MOST_SITES = 1024  # of reductions
_TEXT_CHARS = 1000

log = logging.getLogger("ddpstats")


class Identity(NamedTuple):
    """Whose record it is. ``run`` is the same on all ranks of a program, and no other's."""

    run: str
    rank: int
    world_size: int


class HeldKeys:
    """The structures that this rank held in the calls of one name.

    Structures and layouts are compared by identity; names only where these differ.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._held: set[Structure] = set()
        self._before: tuple[set[Structure], Layout] | None = None
        self._ever: set[str] = set()  # as far as the layout still has them

    def take(self, structure: Structure, layout: Layout) -> list[str] | None:
        """Note one call. Return the keys that this rank has stopped holding, unless nothing has changed."""
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
        return [path for path in dict.fromkeys(names) if path in self._ever and path not in now]


class Recording:
    """The record of one guard: nothing before `begin`, and where no ``directory`` is given.

    Two files take turns, ``rank3.jsonl`` and the older ``rank3.old.jsonl``, so a record is bounded by ``max_bytes`` and
    never holds less than half of that. Every line is one `write` to the kernel: they are whole up to the last one even
    if the process is killed. Each new file begins with what the one before it, which is deleted some day, said of the
    groups and of the rank's state.

    ``identify`` asks whose record it is: None while there is no process group. Raises what the store raises.
    """

    def __init__(
        self,
        directory: str | Path | None,
        identify: Callable[[], Identity | None] = lambda: None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._directory = None if directory is None else Path(directory)
        self._identify, self._limit = identify, max_bytes // 2
        self.has_begun = False
        self._path = Path()
        self._file = -1
        self._head: dict[str, Any] = {}
        self._early: deque[dict[str, Any]] = deque(maxlen=_MOST_EARLY_MARKS)
        self._tries = _TRIES
        self._turn = threading.RLock()  # a mark may come from another thread than the collectives do
        self._groups: dict[str, bytes] = {}  # the lines that describe them
        self._now: dict[str, Any] = {}
        self._before: Evidence | None = None  # of the last event in this file
        self._steps: dict[int, int] = {}  # of each optimizer
        self._held: dict[tuple[str, str, str | None], HeldKeys] = {}  # by the site of a reduction
        self._not_held: dict[str | None, str] = {}  # name of a reduction -> keys
        self._renegotiations = 0

    def subscribe(self) -> None:
        """Record from now on what other parts of ddpstats publish."""
        if self._directory is not None:
            marks.listeners.append(self)

    def begin(self, identity: Identity) -> None:
        """Open the file, unless it is open. Raises `ConfigError` where nothing can be written."""
        with self._turn:
            if self._directory is None or self.has_begun:
                return
            self._path = self._directory / f"rank{identity.rank}.jsonl"
            process = ProcessId.mine().pack().hex()
            self._head = {"ddpstats": FORMAT, **identity._asdict(), "process": process}
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                goes_on = self._is_of(identity.run)
                if not goes_on:
                    self._old_path().unlink(missing_ok=True)
                self._open(goes_on)
            except OSError as error:
                raise ConfigError(
                    f"rank {identity.rank} cannot write its record to {self._directory}: {error.strerror}. "
                    "Give another record_dir (--record-dir), or make this one writable."
                ) from None
            self.has_begun = True
            for entry in self._early:
                self.write(entry)

    def begin_early(self) -> None:
        """`begin` before the guard has connected: where the ranks are known, and the store answers. Raises nothing."""
        if self._directory is None or self.has_begun or not self._tries:
            return
        try:
            identity = self._identify()
            if identity is not None:
                self.begin(identity)
        except (DdpstatsError, *STORE_ERRORS) as error:
            self._tries -= 1
            if not self._tries:
                log.warning("no record is written before the first collective: %s", error)

    def close(self, is_forked: bool = False) -> None:
        """Stop recording. Local and idempotent. ``is_forked``: in a process that was forked from the recorded one."""
        if is_forked:
            self._turn = threading.RLock()  # a thread that is not here may have held it
        with suppress(ValueError):
            marks.listeners.remove(self)
        self._close_file()

    # -- lines --------------------------------------------------------------------------------------------------------

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one line, if the record has begun. A disk that is full stops the record, not the training."""
        with self._turn:
            if self._file < 0:
                return
            line = _line_of(entry)
            self._append(line)
            if "new_group" in entry:  # nothing compares what ranks did there without that
                self._groups[entry["new_group"]] = line
                while sum(map(len, self._groups.values())) > self._limit // 4:  # a program that makes groups for ever
                    del self._groups[next(iter(self._groups))]

    def write_event(self, event: Event) -> None:
        """Append one, without the names in its evidence that the one before it has. A new file begins with all."""
        with self._turn:
            if self._file < 0:
                return
            line = _line_of(event.as_dict(self._before))
            if self._size + len(line) > self._limit:
                line = _line_of(event.as_dict())
            self._append(line)
            self._before = event.evidence if event.word else self._before

    def _append(self, line: bytes) -> None:
        try:
            if self._size + len(line) > self._limit:
                self._close_file()
                os.replace(self._path, self._old_path())
                self._open(False)
            os.write(self._file, line)
            self._size += len(line)
        except OSError:
            self._close_file()

    def _is_of(self, run: str) -> bool:
        """Return whether the same program began the file that exists."""
        try:
            return bool(run) and parse_line(next(raw_lines(self._path))[1]).get("run") == run
        except (OSError, ValueError, StopIteration):
            return False

    def _open(self, goes_on: bool) -> None:
        # Others may write to the directory: a link of theirs must not lead elsewhere, and a pipe must not block.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = require_regular(os.open(self._path, flags, 0o600), self._path)
        if not goes_on:
            os.ftruncate(self._file, 0)
        self._before = None
        now = [_line_of({"now": self._now})] if self._now else []
        os.write(self._file, b"".join([_line_of({**self._head, "time": time.time()}), *self._groups.values(), *now]))
        self._size = os.fstat(self._file).st_size

    def _old_path(self) -> Path:
        return self._path.with_suffix(".old.jsonl")

    def _close_file(self) -> None:
        with self._turn, suppress(OSError):  # none is open; or a network's file system says only now that it is full
            file, self._file = self._file, -1
            os.close(file)

    # -- the rank's state ---------------------------------------------------------------------------------------------

    def note(self, **changes: Any) -> None:
        """Record what has changed of the rank's state."""
        with self._turn:
            self._now.update(changes)
            self.write({"now": changes})

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

    def take_mark(self, mark: Mark) -> None:
        """Record what another part of ddpstats has found, if that is a line that can be read again."""
        self.begin_early()
        with self._turn:
            entry = mark_as_dict(mark)
            if not self.has_begun:
                self._early.append(entry)
            elif len(_line_of(entry)) <= MAX_LINE_BYTES:
                self.write(entry)
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
            self._not_held.clear()
        keys = self._held.setdefault(site, HeldKeys()).take(structure, layout)
        if keys is None:
            return
        name = site[2]
        self._not_held.pop(name, None)
        if keys:
            self._not_held[name] = f"{_some(keys)} (name={name!r})"
        text = "; ".join(reversed(self._not_held.values()))[:_TEXT_CHARS]
        if text != self._now.get("not held any more", ""):
            self.note(**{"not held any more": text})


def _some(keys: Sequence[str]) -> str:
    return shorten(map(repr, keys), _SHOWN_KEYS)


def _line_of(entry: Mapping[str, Any]) -> bytes:
    return (json.dumps(entry, separators=(",", ":")) + "\n").encode("utf-8", "surrogateescape")
