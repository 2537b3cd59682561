"""The timeline as one HTML file, which needs no network, no font and no library.

``page.html`` is the page, whose ``{{...}}`` are filled in here. The data is one JSON text and the columns
of the ranks as binary numbers, compressed, in base64: nothing that a record says is markup or script in the file, and
the page writes it as text only. Its Content-Security-Policy lets nothing run but the page's own script, by its hash.

Layout of the data, after decompression: the size of the JSON text in bytes (uint32), the JSON text, then for each rank
three columns of little-endian uint32: ticks since the event before it, which call, and by how much its number in its
group is more than that of the event before it there, plus one. All numbers are modulo 2**32.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddpstats.guard.diagnosis import GuardFinding
from ddpstats.guard.event import Event
from ddpstats.report.timeline import Key, Timeline

_TEMPLATE = Path(__file__).with_name("page.html")
_SHOWN_VALUES = 1000  # of one rank and path; more where they are not finite
_LARGEST, _TICK_SEC = (1 << 32) - 1, 1e-6

_Calls = dict[tuple[object, ...], tuple[int, Event]]
"""A number for all events that differ in nothing but their own number and time, and one of them."""


def page_of(timeline: Timeline, text: str) -> str:
    """Return HTML. ``text``: the same for people without a script, or with a screen reader."""
    page = _TEMPLATE.read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head, middle, tail = re.split("{{text}}|{{data}}", page.replace("{{hash}}", allowed))
    data = base64.b64encode(zlib.compress(_packed(timeline), 6)).decode()
    return "".join([head, escape(text), middle, data, tail])


def _packed(timeline: Timeline) -> bytes:
    starts = [[timeline.began, *(event.started for event in record.events)] for record in timeline.records]
    longest = max((after - before for times in starts for before, after in pairwise(times)), default=0.0)
    tick = max(_TICK_SEC, longest / (_LARGEST - 1))
    calls: _Calls = {}
    columns = [_columns(record.events, timeline.began, tick, calls) for record in timeline.records]
    header = json.dumps(_header(timeline, tick, [event for _, event in calls.values()])).encode()
    return b"".join([struct.pack("<I", len(header)), header, *columns])


def _columns(events: Sequence[Event], began: float, tick: float, calls: _Calls) -> bytes:
    waits, numbers, steps = list[int](), list[int](), list[int]()
    before, newest = 0, dict[str, int]()
    for event in events:
        now = max(before, round((event.started - began) / tick))  # a clock may have been set back
        same = event.digest, event.signature.shapes, event.label, event.pieces, event.peer, event.tag
        call = event.group, event.site, event.read_source, *same
        waits.append(now - before)
        numbers.append(calls.setdefault(call, (len(calls), event))[0])
        steps.append((event.seq - newest.get(event.group, 0) - 1) & _LARGEST)
        before, newest[event.group] = now, event.seq
    return struct.pack(f"<{3 * len(events)}I", *waits, *numbers, *steps)


def _header(timeline: Timeline, tick: float, calls: Iterable[Event]) -> dict[str, Any]:
    """Return the data for the function ``load`` of the page's script, which reads it by position."""
    began, number_of = timeline.began, {name: number for number, name in enumerate(timeline.groups)}
    return {
        "began": began,
        "tick": tick,
        "seconds": timeline.ended - began,
        "world": timeline.world_size,
        "lanes": [
            {"rank": record.rank, "count": len(record.events), "spans": timeline.spans.get(record.rank, {})}
            for record in timeline.records
        ],
        "calls": [_call(number_of[event.group], event) for event in calls],
        "groups": [[name, *group] for name, group in timeline.groups.items()],
        "messages": timeline.messages,
        "keys": [_key(key, began) for key in timeline.keys],
        "marks": [[mark.kind, mark.text, mark.time - began, mark.step, mark.ranks] for mark in timeline.marks],
        "findings": [
            _finding(number_of.get(finding.group, -1), finding, indexes)
            for finding, indexes in zip(timeline.findings, timeline.indexes, strict=True)
        ],
        "verdict": timeline.verdict,
        "has_findings": timeline.has_findings,
        "notes": [*(f"not compared: {what}" for what in timeline.not_compared), *timeline.assumed, *timeline.notes],
    }


def _call(group: int, event: Event) -> list[Any]:
    words = f"{event}, {event.pieces}".removesuffix(", ")
    return [group, words, event.signature.op, event.label, event.site, event.source, event.is_message]


def _finding(group: int, finding: GuardFinding, indexes: Mapping[int, int]) -> list[Any]:
    by_rank = {rank: [index, rank in finding.culprits] for rank, index in indexes.items()}
    return [finding.kind, group, finding.seq, finding.message, by_rank, finding.missing]


def _key(key: Key, began: float) -> list[Any]:
    cells: dict[int, list[Any]] = {}
    for rank, cell in key.cells.items():
        values = [(time - began, str(value)) for time, value in _thinned(cell.series)]  # JSON has no NaN
        cells[rank] = [cell.count, cell.first_time - began, cell.last_time - began, values]
    is_thinned = any(len(cell.series) > _SHOWN_VALUES for cell in key.cells.values())
    return [key.name, key.source, key.ranks, cells, key.fewer, is_thinned]


def _thinned(series: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return of very many the first and the last, each that is not finite, and each stretch's least and largest."""
    size = -(-len(series) // (_SHOWN_VALUES // 2))
    if size <= 2:
        return list(series)
    kept = {0, len(series) - 1}
    for start in range(0, len(series), size):
        stretch = range(start, min(start + size, len(series)))
        finite = sorted((index for index in stretch if math.isfinite(series[index][1])), key=lambda at: series[at][1])
        kept.update(set(stretch).difference(finite), finite[:1], finite[-1:])
    return [series[index] for index in sorted(kept)]
