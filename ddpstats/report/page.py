"""The timeline as one HTML file that needs nothing else: no network, no font, no library.

``page.html`` is the page; what stands in it between its marks is put in here. The data is one JSON text and the columns
of the lanes as binary numbers, compressed, in base64: nothing that a record says is markup or script in the file, and
the page writes it as text only. Its Content-Security-Policy lets nothing run but the page's own script, by its hash.

Layout of the data, after decompression: the size of the JSON text in bytes (uint32), the JSON text, then for each lane
three columns of little-endian uint32: ticks since the event before it, which call, and by how much its number in its
group is more than that of the event before it there, plus one. All numbers are modulo 2**32.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ddpstats.guard.diagnosis import GuardFinding
from ddpstats.report.timeline import Cell, Key, Lane, Timeline

_TEMPLATE = Path(__file__).with_name("page.html")
_SHOWN_VALUES = 1000  # of one rank and path; more where they are not finite
_LARGEST, _TICK_SEC = (1 << 32) - 1, 1e-6
_PIECE_BYTES = 3 << 18  # base64 of three bytes each needs no padding


def page_of(timeline: Timeline, text: str) -> Iterator[str]:
    """HTML in pieces. ``text``: the same for people without a script, or with a screen reader."""
    page = _TEMPLATE.read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head, _, rest = page.replace("{{hash}}", allowed).partition("{{text}}")
    middle, _, tail = rest.partition("{{data}}")
    yield from (head, escape(text), middle)
    packed = zlib.compress(b"".join(_packed(timeline)), 6)
    for place in range(0, len(packed), _PIECE_BYTES):
        yield base64.b64encode(packed[place : place + _PIECE_BYTES]).decode() + "\n"
    yield tail


def _packed(timeline: Timeline) -> Iterator[bytes]:
    gaps = (b - a for lane in timeline.lanes for a, b in zip([timeline.began, *lane.times], lane.times, strict=False))
    tick = max(_TICK_SEC, max(gaps, default=0.0) / (_LARGEST - 1))
    header = json.dumps(_header(timeline, tick)).encode()
    yield struct.pack("<I", len(header))
    yield header
    for lane in timeline.lanes:
        for column in _columns(timeline, lane, tick):
            if sys.byteorder == "big":
                column.byteswap()
            yield column.tobytes()


def _columns(timeline: Timeline, lane: Lane, tick: float) -> tuple[array[int], array[int], array[int]]:
    waits, seqs = array("I"), array("I")
    before = 0
    newest: dict[str, int] = {}
    for number, time, seq in zip(lane.calls, lane.times, lane.seqs, strict=True):
        now = round((time - timeline.began) / tick)
        group = timeline.calls[number].group
        waits.append(min(now - before, _LARGEST))
        seqs.append((seq - newest.get(group, 0) - 1) & _LARGEST)
        before, newest[group] = now, seq
    return waits, array("I", lane.calls), seqs


def _header(timeline: Timeline, tick: float) -> dict[str, Any]:
    groups = list(timeline.groups)
    place_of = {name: place for place, name in enumerate(groups)}
    return {
        "began": timeline.began,
        "tick": tick,
        "seconds": timeline.ended - timeline.began,
        "world": timeline.world_size,
        "lanes": [_lane(lane) for lane in timeline.lanes],
        "calls": [
            [place_of[call.group], call.what, call.op, call.label, call.site, call.source, call.is_message]
            for call in timeline.calls
        ],
        "groups": [[group.name, group.words, group.ranks, group.cut] for group in timeline.groups.values()],
        "messages": timeline.messages,
        "keys": [_key(timeline, key) for key in timeline.keys],
        "marks": [[mark.kind, mark.text, mark.time - timeline.began, mark.step, mark.ranks] for mark in timeline.marks],
        "findings": [
            _finding(finding, place_of.get(finding.group, -1), places)
            for finding, places in zip(timeline.findings, timeline.places, strict=True)
        ],
        "verdict": timeline.verdict,
        "has_findings": timeline.has_findings,
        "notes": [*(f"not compared: {one}" for one in timeline.not_compared), *timeline.assumed, *timeline.notes],
    }


def _finding(finding: GuardFinding, group: int, places: Mapping[int, int]) -> list[Any]:
    by_rank = {rank: [place, rank in finding.culprits] for rank, place in places.items()}
    return [finding.kind, group, finding.seq, finding.message, by_rank, finding.missing]


def _lane(lane: Lane) -> dict[str, Any]:
    spans = {place: [span.state, span.seconds] for place, span in lane.spans.items()}
    return {"rank": lane.rank, "count": len(lane.calls), "complete": lane.complete, "spans": spans}


def _key(timeline: Timeline, key: Key) -> list[Any]:
    cells = {
        rank: [cell.count, cell.first_time - timeline.began, cell.last_time - timeline.began, _series(timeline, cell)]
        for rank, cell in key.cells.items()
    }
    is_thinned = any(len(cell.series) > _SHOWN_VALUES for cell in key.cells.values())
    return [key.name, key.place, key.ranks, cells, key.fewer, is_thinned]


def _series(timeline: Timeline, cell: Cell) -> list[tuple[float, str]]:
    """Values as text, for JSON has neither NaN nor infinities."""
    return [(time - timeline.began, str(value)) for time, value in _thinned(cell.series)]


def _thinned(series: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of very many the first and the last, each that is not finite, and the least and the largest of each stretch."""
    size = -(-len(series) // (_SHOWN_VALUES // 2))
    if size <= 2:
        return list(series)
    kept = {0, len(series) - 1}
    for start in range(0, len(series), size):
        stretch = range(start, min(start + size, len(series)))
        finite = [place for place in stretch if math.isfinite(series[place][1])]
        kept.update(set(stretch).difference(finite))
        if finite:
            kept.update({min(finite, key=lambda at: series[at][1]), max(finite, key=lambda at: series[at][1])})
    return [series[place] for place in sorted(kept)]
