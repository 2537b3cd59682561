"""A rank's collectives as a file of JSON lines, which outlives the process however it ends."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ddpstats._base.files import (
    LATEST_TIME_SEC,
    bounded_lines,
    explain_version,
    open_regular,
    parse_json,
)
from ddpstats._base.marks import Mark
from ddpstats.guard.event import Event, MessageNumbers, event_of, line_of, text_of

FORMAT = 1
MAX_LINE_BYTES = 1 << 20
MAX_BYTES = 32 << 20  # of both files together
_MOST_RANKS = 1 << 31
_MAX_FILE_BYTES = 2 * MAX_BYTES  # that are read
_NAME = re.compile(r"rank(0|[1-9]\d*)\.jsonl")
_NUMBERED = re.compile(rb'(.*?"seq":)(0|[1-9]\d{0,15})(,.*"time":)(\d{1,12}(?:\.\d{1,12})?)([,}].*\n)', re.DOTALL)


@dataclass(frozen=True)
class RankRecord:
    """One rank's record. ``end`` is the entry that says how the rank left, if it left.

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
    marks: tuple[Mark, ...] = ()

    @cached_property
    def messages(self) -> Sequence[tuple[int, Event]]:
        """Return (index among the events, event) of each message, with its number: 0 where older lines were dropped."""
        numbers = MessageNumbers()
        return [
            (index, replace(event, seq=numbers.next(event) if self.complete else 0))
            for index, event in enumerate(self.events)
            if event.is_message
        ]

    @cached_property
    def events_by_group(self) -> Mapping[str, list[Event]]:
        by_group: dict[str, list[Event]] = {}
        for event in self.events:
            by_group.setdefault(event.group, []).append(event)
        return by_group


class NoRecord(ValueError):
    """Raised where there is no record, or one that holds nothing yet."""


def read_records(*directories: str | Path, notes: list[str] | None = None) -> list[RankRecord]:
    """Return the records of all ranks of the newest run, by rank; directories may hold those of older ones.

    What was left out is appended to ``notes``. Raises ValueError, naming the file and line, for a malformed file, for a
    rank that has two, and `NoRecord` where no record exists.
    """
    left_out: list[str] = [] if notes is None else notes
    paths = _record_files(directories, left_out)
    records = [(path, record) for path in paths for record in _read_if_begun(path, left_out)]
    if not records:
        raise NoRecord(f"{', '.join(map(str, directories))} holds no rank*.jsonl, so no record of ddpstats")
    newest = max((record for _, record in records), key=lambda record: record.started).run
    by_rank: dict[int, tuple[Path, RankRecord]] = {}
    for path, record in records:
        if record.run == newest and by_rank.setdefault(record.rank, (path, record))[0] != path:
            raise ValueError(f"{by_rank[record.rank][0]} and {path} are both of rank {record.rank}: remove one")
    return [by_rank[rank][1] for rank in sorted(by_rank)]


def _record_files(directories: Sequence[str | Path], notes: list[str]) -> Iterator[Path]:
    """Yield the newer of each rank's two files, also where a process was killed before it began that."""
    paths = [path for directory in directories for path in sorted(Path(directory).glob("rank*.jsonl"))]
    for path in dict.fromkeys(path.with_name(path.name.replace(".old.", ".")) for path in paths):
        if _NAME.fullmatch(path.name):
            yield path
        else:
            notes.append(f"{path} is left out: the record of a rank is called rank<number>.jsonl")


def _read_if_begun(path: Path, notes: list[str]) -> Iterator[RankRecord]:
    link = f", a link to {os.readlink(path)}" if path.is_symlink() else ""
    try:
        record = _read_rank(path)
    except NoRecord as error:
        notes.append(f"{path}{link} is left out: {error}")
    except OSError as error:
        reasons = {FileNotFoundError: "there is no such file", IsADirectoryError: "it is a directory, and no record"}
        raise ValueError(f"{reasons.get(type(error), error.strerror)}: {error.filename or path}{link}") from None
    except ValueError as error:
        raise ValueError(f"{error}; {path} is{link[1:]}" if link else str(error)) from None
    else:
        if path.name == f"rank{record.rank}.jsonl":
            yield record
        else:
            notes.append(f"{path}{link} is left out: it is a record of rank {record.rank}")


def _read_rank(path: Path) -> RankRecord:
    old = path.with_suffix(".old.jsonl")
    head: Mapping[str, Any] | None = None
    end: Mapping[str, Any] | None = None
    groups: dict[str, Mapping[str, Any]] = {}
    events: list[Event] = []
    marks: list[Mark] = []
    known: dict[tuple[bytes, ...], Event] = {}
    sources = [source for source in (old, path) if os.path.lexists(source)]
    for source in sources:
        for number, line in raw_lines(source):
            numbers, rest = _split_numbers(line)
            if (event := known.get(rest)) is not None:
                events.append(event_of((event, int(numbers[0]), float(numbers[1]))))
                continue
            try:
                entry = parsed(line)
                if "op" in entry:
                    events.append(Event.from_dict(entry))
                    if numbers:
                        known[rest] = events[-1]
                elif "mark" in entry:
                    marks.append(mark_from_dict(entry))
                elif "ddpstats" in entry:
                    head, end = checked_head(entry), None
                elif "new_group" in entry:
                    groups[text_of(entry["new_group"])] = checked_group(entry)
                elif "end" in entry:
                    end = {**entry, "end": line_of(entry["end"])}
            except (ValueError, TypeError) as error:
                raise ValueError(f"{source}, line {number}: {error}") from None
    if head is None and not groups and not events and not marks and end is None:
        raise NoRecord("the process had not written a whole line when it ended")
    if head is None:
        raise ValueError(f"{path} does not begin as a record of ddpstats does")
    return RankRecord(
        head.get("run", ""),
        float(head.get("time", 0.0)),
        head["rank"],
        head["world_size"],
        groups,
        tuple(events),
        end,
        old not in sources,
        tuple(marks),
    )


def checked_head(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    refused = explain_version(entry["ddpstats"], FORMAT)
    if refused is not None:
        raise ValueError(refused)
    if not all(type(entry.get(key)) is int and 0 <= entry[key] < _MOST_RANKS for key in ("rank", "world_size")):
        raise ValueError("the first line lacks a rank or a world size")
    is_time = type(entry.get("time", 0.0)) in (int, float) and abs(entry.get("time", 0.0)) < LATEST_TIME_SEC
    if type(entry.get("run", "")) is not str or not is_time:
        raise ValueError("the first line lacks a run or a time")
    return entry


def checked_group(entry: Mapping[str, Any]) -> dict[str, Any]:
    ranks, words = entry.get("ranks"), entry.get("words", entry["new_group"])
    if not isinstance(ranks, list) or not ranks or not all(type(rank) is int for rank in ranks):
        raise ValueError("a group without ranks")
    if len(set(ranks)) != len(ranks):
        raise ValueError("a group that has a rank twice")
    return {"ranks": ranks, "words": line_of(words)}


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open_regular(path) as file:
        size, number = os.fstat(file.fileno()).st_size, 0
        if size > _MAX_FILE_BYTES:
            raise ValueError(f"{path}: {size:,} bytes, and no record has more than {_MAX_FILE_BYTES:,}")
        try:
            for line in bounded_lines(file, MAX_LINE_BYTES):
                if not line.endswith(b"\n"):
                    return  # the process was killed in the middle of it
                number += 1
                yield number, line
        except ValueError as error:
            raise ValueError(f"{path}, line {number + 1}: {error}") from None


def parsed(line: bytes) -> dict[str, Any]:
    entry = parse_json(line)
    if not isinstance(entry, dict):
        raise ValueError("not a record")
    return entry


def _split_numbers(line: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Return number and time of an event, and the rest, which most lines share; both empty for other lines."""
    match = _NUMBERED.fullmatch(line)
    return ((), ()) if match is None else ((match[2], match[4]), (match[1], match[3], match[5]))


# -- marks ------------------------------------------------------------------------------------------------------------


def mark_as_dict(mark: Mark) -> dict[str, Any]:
    """Return a mark as a line of a record, or of a report, holds it."""
    values = {name: _finite_or_str(value) for name, value in mark.values.items()}
    optional = {"step": mark.step, "ranks": list(mark.ranks), "text": mark.text, "values": values}
    held = {key: value for key, value in optional.items() if value or value == 0}
    return {"mark": mark.kind, "time": mark.time, **held}


def mark_from_dict(content: Mapping[str, Any]) -> Mark:
    """Read what `mark_as_dict` wrote. Raises ValueError for anything that it does not write."""
    kind, text, step = content.get("mark"), content.get("text", ""), content.get("step")
    when: Any = content.get("time")
    ranks, values = content.get("ranks", []), content.get("values", {})
    if not isinstance(kind, str) or not isinstance(text, str) or not isinstance(values, dict):
        raise ValueError("a mark without kind, text or values")
    if type(when) not in (int, float) or not 0 <= when < LATEST_TIME_SEC or type(step) not in (int, type(None)):
        raise ValueError("a mark without time or step")
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise ValueError("a mark without ranks")
    read_values = {name: _read_number(value) for name, value in values.items()}
    return Mark(kind, text, float(when), step, tuple(ranks), read_values)


def _finite_or_str(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(float(value))


def _read_number(value: Any) -> float | None:
    if value is None:
        return None
    if value in ("nan", "inf", "-inf") or (type(value) in (float, int, bool) and abs(value) <= sys.float_info.max):
        return float(value)
    raise ValueError("a mark whose value is no number")
