"""A rank's collectives as a file of JSON lines, which outlives the process however it ends."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpstats.errors import ConfigError
from ddpstats.guard._events import Event, Evidence, text_of

FORMAT = 1
_MAX_LINE_BYTES = 1 << 20


class RecordWriter:
    """One rank's events as JSON lines, whole up to the last one even if the process is killed.

    Two files take turns, ``rank3.jsonl`` and the older ``rank3.old.jsonl``, so a record is bounded by ``max_bytes`` and
    never holds less than half of that. Every line is one `write` to the kernel: nothing is kept in this process.
    """

    def __init__(
        self, directory: str | Path, rank: int, world_size: int, run: str = "", max_bytes: int = 32 << 20
    ) -> None:
        """``run``: the same on all ranks of a program, and no other's. Its next guard goes on in the same file."""
        self._path = Path(directory) / f"rank{rank}.jsonl"
        self._limit = max_bytes // 2
        self._before: Evidence | None = None  # of the last event
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
        self.write(event.as_dict(self._before))
        self._before = event.evidence if event.word else self._before

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one line. A disk that is full stops the record, not the training."""
        line = (json.dumps(entry, separators=(",", ":")) + "\n").encode("utf-8", "surrogateescape")
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
            return bool(run) and next(_lines(self._path))[1].get("run") == run
        except (OSError, ValueError, StopIteration):
            return False

    def _open(self, goes_on: bool) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (0 if goes_on else os.O_TRUNC)
        file = os.open(self._path, flags, 0o644)
        os.write(file, (json.dumps({**self._head, "time": time.time()}) + "\n").encode())
        self._before = None  # every file can be read by itself
        self._size = os.fstat(file).st_size
        return file

    def _old_path(self) -> Path:
        return self._path.with_suffix(".old.jsonl")

    def close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)


@dataclass(frozen=True)
class RankRecord:
    """What one rank's files hold. ``end`` is the last entry that is no event: how the rank left, if it said so.

    ``run`` names the program, ``started`` is when its last guard began: seconds since 1970.
    """

    run: str
    started: float
    rank: int
    world_size: int
    groups: Mapping[str, Mapping[str, Any]]
    events: tuple[Event, ...]
    end: Mapping[str, Any] | None
    complete: bool


def read_records(directory: str | Path) -> list[RankRecord]:
    """The records of all ranks of the newest run, by rank; a directory may hold those of older ones.

    Raises ValueError, naming the file and line, for what is no record.
    """
    found = [_read_rank(path) for path in sorted(Path(directory).glob("rank*.jsonl")) if ".old" not in path.suffixes]
    if not found:
        raise ValueError(f"{directory} holds no rank*.jsonl, so no record of ddpstats")
    newest = max(found, key=lambda record: record.started).run
    return sorted((record for record in found if record.run == newest), key=lambda record: record.rank)


def _read_rank(path: Path) -> RankRecord:
    old = path.with_suffix(".old.jsonl")
    head: Mapping[str, Any] | None = None
    end: Mapping[str, Any] | None = None
    groups: dict[str, Mapping[str, Any]] = {}
    events: list[Event] = []
    before: Evidence | None = None
    for source in [old, path] if old.exists() else [path]:
        for number, entry in _lines(source):
            try:
                if "op" in entry:
                    events.append(Event.from_dict(entry, before))
                    before = events[-1].evidence or before
                elif "ddpstats" in entry:
                    head, end, before = _checked_head(entry), None, None
                elif "new_group" in entry:
                    groups[text_of(entry["new_group"])] = entry
                elif "end" in entry:
                    end = entry
            except (ValueError, TypeError) as error:
                raise ValueError(f"{source}, line {number}: {error}") from None
    if head is None:
        raise ValueError(f"{path} does not begin as a record of ddpstats does")
    return RankRecord(
        str(head.get("run", "")),
        float(head.get("time", 0.0)),
        int(head["rank"]),
        int(head["world_size"]),
        groups,
        tuple(events),
        end,
        not old.exists(),
    )


def _checked_head(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    if entry["ddpstats"] != FORMAT:
        raise ValueError(f"a record of format {entry['ddpstats']!r}; this version reads {FORMAT}")
    if not all(isinstance(entry.get(key), int) for key in ("rank", "world_size")):
        raise ValueError("the first line tells neither rank nor world size")
    return entry


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # the process was killed in the middle of it
            if len(line) > _MAX_LINE_BYTES:
                raise ValueError(f"{path}, line {number}: too long to be of a record")
            try:
                entry = json.loads(line)
            except ValueError:
                raise ValueError(f"{path}, line {number}: not JSON") from None
            if not isinstance(entry, dict):
                raise ValueError(f"{path}, line {number}: not a record")
            yield number, entry
