"""PyTorch's Flight Recorder dumps (``fr_trace``'s input) as records like the guard's, and joined with them.

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
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ddpstats._base.files import open_regular, parse_json, read_at_most
from ddpstats.guard.event import MESSAGES, Event, line_of, text_of
from ddpstats.guard.record import RankRecord, checked_group

_NAME = re.compile(r"(?:[\w\-.]*[_\-.])?rank_?(\d{1,7})(?:\.json|\.pkl)?")
_MAX_BYTES = 64 << 20
_PLAIN_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
)
_PEERS = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})")
_IN_TORCH = re.compile(r"(.*\btorch/)distributed/.+")
_COMPARED = {"scatter": "output", "all_to_all": "", "all_to_all_single": "", "alltoall": "", "alltoall_base": ""}


class Span(NamedTuple):
    """The state of an event, by the Flight Recorder's name for it, and how long it took if it has ended."""

    state: str
    seconds: float | None


class FlightDump(NamedTuple):
    """One rank's file, in the form of a record. ``spans``: of its events, in their order."""

    record: RankRecord
    spans: Sequence[Span]


def read_dumps(directories: Iterable[Path]) -> list[FlightDump]:
    """Return the dumps in the order of ranks. Raises ValueError, which names the file, and OSError."""
    dumps: dict[int, tuple[Path, FlightDump]] = {}
    for path in [path for directory in directories for path in sorted(directory.iterdir())]:
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_file():
            continue
        rank = int(match[1])
        if rank in dumps:
            raise ValueError(f"{dumps[rank][0]} and {path} are both a dump of rank {rank}: take one away")
        try:
            with open_regular(path) as file:
                dumps[rank] = path, _read(rank, read_at_most(file, _MAX_BYTES))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is no dump of the Flight Recorder: {error!r}") from None
    return [dumps[rank][1] for rank in sorted(dumps)]


def join(record: RankRecord, dump: FlightDump) -> dict[int, Span]:
    """Return what the recorder knows of the record's events, by their index. Both are of one rank."""
    indexes: dict[str, list[int]] = {}
    for index, event in enumerate(record.events):
        indexes.setdefault(event.group.removesuffix(MESSAGES), []).append(index)
    spans: dict[int, Span] = {}
    for entry, span in zip(dump.record.events, dump.spans, strict=True):
        of_group = indexes.get(entry.group.removesuffix(MESSAGES), [])
        at = bisect_right(of_group, entry.started, key=lambda index: record.events[index].started)
        if at:
            spans.setdefault(of_group[at - 1], span)
    return spans


class _PlainUnpickler(pickle._Unpickler):
    """An unpickler that knows the opcodes of plain values alone: it can neither look up a name nor call anything.

    A pair becomes a list, which cannot be a key of a dict: the hash of a deep tuple overflows C's stack.
    """

    stack: list[Any]

    def _make_pair(self) -> None:
        self.stack[-2:] = [self.stack[-2:]]

    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _PLAIN_OPCODES}
    dispatch[pickle.TUPLE2[0]] = _make_pair


def unpickle_plain(data: bytes) -> Any:
    """Return the dicts, lists, pairs, text and numbers of a pickle. Raises ValueError for any other content."""
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise ValueError(f"it holds more than plain values, or ends too early: {type(error).__name__}") from None


def _read(rank: int, data: bytes) -> FlightDump:
    content = parse_json(data) if data[:1] == b"{" else unpickle_plain(data)
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("it has no entries")
    groups = _groups(content.get("pg_config") or {})
    events: list[Event] = []
    spans: list[Span] = []
    newest: dict[str, int] = {}
    for entry in content["entries"]:
        event, span = _event(entry, groups), _span(entry)
        if event.peer is not None or newest.get(event.group, -1) < event.seq:
            newest[event.group] = event.seq  # of calls that were coalesced, and have one number, the first is kept
            events.append(event)
            spans.append(span)
    world_size = max([rank + 1, *(len(group["ranks"]) for group in groups.values())])
    is_whole = not events or content["entries"][0].get("record_id") == 0
    started = events[0].started if events else 0.0
    return FlightDump(RankRecord("", started, rank, world_size, groups, tuple(events), None, is_whole), spans)


def _groups(config: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the groups whose ranks are known. gloo's dumps know none."""
    groups = {}
    for name, group in config.items():
        ranks = parse_json(group["ranks"])
        if ranks:
            words = f"group {name} ({line_of(group.get('desc', ''))})"
            groups[name] = checked_group({"new_group": name, "ranks": ranks, "words": words})
    return groups


def _event(entry: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> Event:
    """Return an entry as the event that the guard's record would have of it."""
    group, op, peer = text_of(entry["process_group"][0]), line_of(entry["profiling_name"]).rpartition(":")[2], None
    message = _PEERS.fullmatch(op)
    if message is not None:
        op, peer = message[1], int(message[3])
        peer = groups[group]["ranks"][peer] if group in groups else peer  # it is a rank of the group
    is_message = op in ("send", "recv")
    compared = _COMPARED.get(op, "input")
    return Event.from_dict(
        {
            "group": f"{group}{MESSAGES}" if is_message else group,
            "seq": entry["p2p_seq_id" if is_message else "collective_seq_id"],
            "op": op,
            "shapes": entry.get(f"{compared}_sizes", []),
            "dtypes": entry.get(f"{compared}_dtypes", []),
            "peer": peer,
            "time": int(entry["time_created_ns"]) / 1e9,
            "site": _call_site(entry.get("frames", [])),
        }
    )


def _span(entry: Mapping[str, Any]) -> Span:
    begun = int(entry.get("time_discovered_started_ns") or entry["time_created_ns"])
    ended = int(entry.get("time_discovered_completed_ns") or 0)
    return Span(line_of(entry.get("state", "")), (ended - begun) / 1e9 if ended >= begun else None)


def _call_site(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost frame outside torch and the guard. Frames begin with the innermost: torch's collective."""
    files = [line_of(frame["filename"]) for frame in frames]
    of_torch = [match[1] for file in files if (match := _IN_TORCH.fullmatch(file))][:1]
    for file, frame in zip(files, frames, strict=True):
        if not any(directory in file for directory in ("/ddpstats/_observe/", *of_torch)):
            return f"{file}:{int(frame['line'])} in {line_of(frame['name'])}"
    return ""
