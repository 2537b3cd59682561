"""PyTorch's Flight Recorder dumps (``fr_trace``'s input) as records like ours, and joined with ours.

1. A file is named by prefix and rank, as ``nccl_trace_rank_3``: a pickle (`_PlainUnpickler`) or JSON.
2. An entry becomes an event: its group, its number there, operation and shapes, and the innermost frame outside torch.
   The recorder knows neither reduce ops, roots nor tags.
3. Beside a record of the guard, an entry adds to the event that was recorded last before it on that rank and group:
   both times are of one clock, and the guard writes before torch is called.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ddpstats._base.files import LATEST_TIME_SEC, open_regular, parse_json, read_at_most
from ddpstats.guard.event import MESSAGES, Event, Signature, digest_of, line_of, text_of
from ddpstats.guard.record import RankRecord
from ddpstats.report.timeline import Span

_NAME = re.compile(r"(?:[\w\-.]*[_\-.])?rank_?(\d{1,7})(?:\.json|\.pkl)?")
_MAX_BYTES = 64 << 20
_MOST_ENTRIES, _MOST_MEMBERS, _MOST_FRAMES, _MOST_SIZES = 1 << 20, 1 << 22, 256, 4096
_MOST_DIMENSIONS, _MOST_TEXT, _LEAST_ENTRY_BYTES = 64, 1000, 32
_PLAIN_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.EMPTY_DICT),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
)
_PEERS = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})")
_IN_TORCH = re.compile(r"(.*\btorch/)distributed/.+")
_COMPARED = {"scatter": "output", "all_to_all": "", "all_to_all_single": "", "alltoall": "", "alltoall_base": ""}


@dataclass(frozen=True)
class FlightDump:
    """One rank's file, in the form of a record. ``spans``: of its events, in their order."""

    record: RankRecord
    spans: Sequence[Span]


def read_dumps(directories: Iterable[Path]) -> list[FlightDump]:
    """Return the dumps in the order of ranks. Raises ValueError, which names the file, and OSError."""
    found: dict[int, tuple[Path, FlightDump]] = {}
    for path in [path for directory in directories for path in sorted(directory.iterdir())]:
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_file():
            continue
        rank = int(match[1])
        if rank in found:
            raise ValueError(f"{found[rank][0]} and {path} are both a dump of rank {rank}: take one away")
        try:
            with open_regular(path) as file:
                found[rank] = path, _dump(rank, read_at_most(file, _MAX_BYTES))
        except ValueError as error:
            raise ValueError(f"{path} is no dump of the Flight Recorder: {error}") from None
    return [found[rank][1] for rank in sorted(found)]


def joined(record: RankRecord, dump: FlightDump) -> dict[int, Span]:
    """Place among the record's events -> what the recorder knows of it. Both are of one rank."""
    places: dict[str, list[int]] = {}
    for place, event in enumerate(record.events):
        places.setdefault(event.group.removesuffix(MESSAGES), []).append(place)
    found: dict[int, Span] = {}
    next_of = dict.fromkeys(places, 0)
    for entry, span in zip(dump.record.events, dump.spans, strict=True):
        group = entry.group.removesuffix(MESSAGES)
        held, at = places.get(group, []), next_of.get(group, 0)
        while at + 1 < len(held) and record.events[held[at + 1]].started <= entry.started:
            at += 1
        if at < len(held) and record.events[held[at]].started <= entry.started:
            found.setdefault(held[at], span)
            next_of[group] = at
    return found


def _content(data: bytes) -> dict[str, Any]:
    content = parse_json(data) if data[:1] == b"{" else unpickle_plain(data)
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("it has no entries")
    most = min(_MOST_ENTRIES, len(data) // _LEAST_ENTRY_BYTES)
    if len(content["entries"]) > most:
        raise ValueError(f"it has more than {most:,} entries")
    return content


def unpickle_plain(data: bytes) -> Any:
    """Return the dicts, lists, tuples, text and numbers of a pickle. Raises ValueError if it holds anything else."""
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise ValueError(f"it holds more than plain values, or ends too early: {type(error).__name__}") from None


class _PlainUnpickler(pickle._Unpickler):
    """An unpickler that knows the opcodes of plain values alone: it can neither look up a name nor call anything."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def _set_items(self, items: Sequence[Any]) -> None:
        keys, values = items[::2], items[1::2]
        if not all(type(key) in (str, int, float) for key in keys):  # the hash of a deep tuple overflows C's stack
            raise TypeError("a key that is neither text nor a number")
        self.stack[-1].update(zip(keys, values, strict=True))

    def _set_items_to_mark(self) -> None:
        self._set_items(self.pop_mark())

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _PLAIN_OPCODES}
    dispatch |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items_to_mark}


class _Budget:
    """A limit on the work: as many parts as the file has bytes. One list of a pickle may occur in many places."""

    def __init__(self, size: int) -> None:
        self._left = size

    def of(self, parts: Sequence[Any]) -> Sequence[Any]:
        self._left -= len(parts)
        if self._left < 0:
            raise ValueError("more parts than the file has bytes")
        return parts

    def shape(self, sizes: Sequence[Any]) -> tuple[int, ...]:
        if len(sizes) > _MOST_DIMENSIONS:
            raise ValueError("a shape of too many dimensions")
        return tuple(map(_whole, self.of(sizes)))


def _dump(rank: int, data: bytes) -> FlightDump:
    content, budget = _content(data), _Budget(len(data))
    ranks_of = dict(_groups(content.get("pg_config")))
    found: list[tuple[Event, Span]] = []
    words: dict[str, str] = {}
    newest: dict[str, int] = {}
    for number, entry in enumerate(content["entries"]):
        try:
            event, span = _event(entry, ranks_of, budget)
            words.setdefault(event.group, f"group {event.group} ({_short(entry['process_group'][1])})"[:200])
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"entry {number}: {type(error).__name__}") from None
        if event.peer is None and newest.get(event.group, -1) >= event.seq:
            continue  # of calls that were coalesced, and have one number, the first stands for all
        newest[event.group] = event.seq
        found.append((event, span))
    events = tuple(event for event, _ in found)
    groups = {name: {"ranks": ranks_of[name], "words": words[name]} for name in words if name in ranks_of}
    world = max((len(ranks) for ranks in ranks_of.values()), default=0)
    is_whole = not events or content["entries"][0].get("record_id") == 0
    started = events[0].started if events else 0.0
    record = RankRecord("", started, rank, max(world, rank + 1), groups, events, None, is_whole)
    return FlightDump(record, [span for _, span in found])


def _groups(config: Any) -> Iterator[tuple[str, list[int]]]:
    """Name -> ranks. The default group has no name there with gloo, and "0" in the entries."""
    known: dict[str, Any] = {}
    left = _MOST_MEMBERS
    for name, given in config.items() if isinstance(config, dict) else ():
        text = given.get("ranks") if isinstance(given, dict) else None
        if not isinstance(name, str) or not isinstance(text, str) or text.count("[") != 1 or "{" in text:
            continue
        if text not in known:
            known[text] = parse_json(text)
        ranks = known[text]
        if isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks):
            left -= len(ranks)
            if left < 0:
                raise ValueError(f"its groups have more than {_MOST_MEMBERS:,} members")
            yield name or "0", sorted(set(ranks))


def _event(entry: Mapping[str, Any], ranks_of: Mapping[str, Sequence[int]], budget: _Budget) -> tuple[Event, Span]:
    group, op = _short(entry["process_group"][0]), _short(entry["profiling_name"]).rpartition(":")[2]
    message, peer = _PEERS.fullmatch(op), None
    if message is not None:
        op, peer = message[1], int(message[3])  # a rank of the group
        peer = ranks_of[group][peer] if peer < len(ranks_of.get(group, ())) else peer
    is_message = op in ("send", "recv")
    side = _COMPARED.get(op, "input")
    sizes = budget.of(entry.get(f"{side}_sizes", [])[:_MOST_SIZES])
    dtypes = budget.of(entry.get(f"{side}_dtypes", [])[:_MOST_SIZES])
    shapes = tuple(map(budget.shape, sizes))
    kinds = tuple(map(_short, dtypes)) if len(dtypes) == len(shapes) else ("tensor",) * len(shapes)
    signature = Signature(op, shapes=shapes, dtypes=kinds)
    created = _seconds(entry["time_created_ns"])
    event = Event(
        f"{group}{MESSAGES}" if is_message else group,
        _whole(entry["p2p_seq_id" if is_message else "collective_seq_id"]),
        signature,
        None,
        0,
        _site(budget.of(entry.get("frames", [])[:_MOST_FRAMES])),
        digest_of(signature),
        peer=peer,
        started=created,
    )
    ended = _seconds(entry.get("time_discovered_completed_ns") or 0)
    begun = _seconds(entry.get("time_discovered_started_ns") or 0) or created
    return event, Span(line_of(entry.get("state", ""))[:40], ended - begun if ended >= begun > 0 else None)


def _short(text: Any) -> str:
    if len(text_of(text)) > _MOST_TEXT:
        raise ValueError("a name that is too long")
    return line_of(text)


def _whole(number: Any) -> int:
    if type(number) is not int or abs(number) >= 1 << 63:
        raise ValueError("no whole number")
    return number


def _seconds(nanoseconds: Any) -> float:
    if type(nanoseconds) is not int or not 0 <= nanoseconds < LATEST_TIME_SEC * 1e9:
        raise ValueError("no time")
    return nanoseconds / 1e9


def _site(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost frame outside torch and the guard. Frames begin with the innermost: torch's collective."""
    inner = ["/ddpstats/_observe/"]
    for frame in frames:
        file = line_of(frame["filename"])[-_MOST_TEXT:]
        if len(inner) == 1 and (match := _IN_TORCH.fullmatch(file)):
            inner.append(match[1])
        if not any(directory in file for directory in inner):
            return f"{file}:{_whole(frame['line'])} in {line_of(frame['name'])[:200]}"
    return ""
