"""PyTorch's Flight Recorder dumps (``fr_trace``'s input) as records like the guard's, and joined with them.

1. A file is named by prefix and rank, as ``nccl_trace_rank_3``: a pickle or JSON. This is the one place where ddpstats
   unpickles what it has not written itself, and nothing that the file names is found (`_PlainUnpickler`).
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
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ddpstats._base.files import parse_json, read_regular
from ddpstats._observe.operators import OPERATORS
from ddpstats.guard.event import MESSAGES, Event, line_of, text_of
from ddpstats.guard.record import RankRecord, check_group

_NAME = re.compile(r"(?:[\w\-.]*[_\-.])?rank_?(\d{1,7})(?:\.json|\.pkl)?")
_MAX_BYTES = 64 << 20
_RAISED_BY_OTHER_FILES = (
    *(pickle.UnpicklingError, EOFError, MemoryError, RecursionError),
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError),
)
_PEERS = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})")
_IN_TORCH = re.compile(r"(.*\btorch/)distributed/.+")


class Span(NamedTuple):
    """The state of an event, by the Flight Recorder's name for it, and how long it took if it has ended."""

    state: str
    seconds: float | None


Spans = Mapping[tuple[str, float], Span]  # group and time of an event -> its state


def read_dumps(directories: Iterable[Path]) -> dict[int, tuple[RankRecord, Spans]]:
    """Return each rank's dump as a record, and its spans, in the order of ranks.

    Raises ValueError, which names the file, and OSError.
    """
    paths: dict[int, Path] = {}
    for path in [path for directory in directories for path in sorted(directory.iterdir())]:
        match = _NAME.fullmatch(path.name)
        if match is not None and path.is_file() and paths.setdefault(int(match[1]), path) is not path:
            raise ValueError(f"{paths[int(match[1])]} and {path} are both a dump of rank {match[1]}: take one away")
    return {rank: _read(rank, paths[rank]) for rank in sorted(paths)}


def join(record: RankRecord, recorder_spans: Spans) -> Spans:
    """Return what the recorder knows of the record's events. Both are of one rank."""
    events_of: defaultdict[str, list[Event]] = defaultdict(list)
    for event in record.events:
        events_of[event.group.removesuffix(MESSAGES)].append(event)
    spans: dict[tuple[str, float], Span] = {}
    for (group, started), span in recorder_spans.items():
        events = events_of[group.removesuffix(MESSAGES)]
        at = bisect_right(events, started, key=attrgetter("started"))
        if at:
            spans.setdefault((events[at - 1].group, events[at - 1].started), span)
    return spans


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that finds no class and no function by its name: a file has nothing that it could call."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError("it holds more than plain values")


def _read(rank: int, path: Path) -> tuple[RankRecord, Spans]:
    try:
        data = read_regular(path, _MAX_BYTES)
        return _dump_of(rank, parse_json(data) if data[:1] == b"{" else _PlainUnpickler(io.BytesIO(data)).load())
    except _RAISED_BY_OTHER_FILES as error:
        raise ValueError(f"{path} is no dump of the Flight Recorder: {error!r}") from None


def _dump_of(rank: int, content: Any) -> tuple[RankRecord, Spans]:
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("it has no entries")
    groups = _groups(content.get("pg_config") or {})
    events: list[Event] = []
    spans: dict[tuple[str, float], Span] = {}
    newest: dict[str, int] = {}
    for entry in content["entries"]:
        event = _event(entry, groups)
        if event.peer is not None or newest.get(event.group, -1) < event.seq:
            newest[event.group] = event.seq  # of calls that were coalesced, and have one number, the first is kept
            events.append(event)
            spans[event.group, event.started] = _span(entry)
    world_size = max([rank + 1, *(len(group["ranks"]) for group in groups.values())])
    is_whole = not events or content["entries"][0].get("record_id") == 0
    started = events[0].started if events else 0.0
    return RankRecord("", started, rank, world_size, groups, tuple(events), None, is_whole), spans


def _groups(config: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the groups whose ranks are known. gloo's dumps know none."""
    groups = {}
    for name, group in config.items():
        if ranks := parse_json(group["ranks"]):
            words = f"group {name} ({line_of(group.get('desc', ''))})"
            groups[name] = check_group({"new_group": name, "ranks": ranks, "words": words})
    return groups


def _event(entry: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> Event:
    """Return an entry as the event that the guard's record would have of it."""
    group, op, peer = text_of(entry["process_group"][0]), line_of(entry["profiling_name"]).rpartition(":")[2], None
    message = _PEERS.fullmatch(op)
    if message is not None:
        op, peer = message[1], int(message[3])
        peer = groups[group]["ranks"][peer] if group in groups else peer  # it is a rank of the group
    is_message = op in ("send", "recv")
    compared = _find_compared(op)
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


def _find_compared(op: str) -> str:
    """Return which tensors of an operation have the same shapes on all ranks: "input", "output", or "" for none.

    Dumps call it as torch's function is called, or as the method of ``ProcessGroup``.
    """
    for operator in OPERATORS.values():
        if op in (operator.op, *operator.method_names) and operator.compared == "pieces" and not operator.to_root:
            return "output" if "root_rank" in operator.arguments else ""
    return "input"


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
