"""An event in a few hundred bytes, for the memory that the ranks of a host share: what a rank was about to issue.

Encoding an event costs as much as some small collectives, and a program issues the same few again and again. So the
bytes of an event are cached; the number, which changes with each call, is stored beside them.
"""

from __future__ import annotations

import dataclasses
import json
import linecache
import os
from collections.abc import Iterable
from typing import Any

from ddpstats._base.files import parse_json
from ddpstats.guard.event import Event
from ddpstats.guard.notes_shm import EVENT_BYTES, Words

_MAX_CACHED = 4096
_MAX_SHAPES = 3
_MAX_CHARS = 200

_cache: dict[int, tuple[Words, Event]] = {}  # by the id of the event, which stays alive


def encode(event: Event) -> Words:
    """Return the event's bytes, without its number."""
    entry = _cache.get(id(event))
    if entry is None:
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        entry = _cache[id(event)] = Words.of(_payload_of(event)), event
    return entry[0]


def _payload_of(event: Event) -> bytes:
    # Its label is shown, and not compared (no word): the evidence for it takes a while to work out.
    plain = dataclasses.replace(
        event, seq=0, started=0.0, site=str(event.site), read_source="", word=0, evidence_source=None
    )
    fields = plain.as_dict()
    payload = json.dumps(fields, separators=(",", ":")).encode("utf-8", "surrogateescape")
    return payload if len(payload) <= EVENT_BYTES else _short_payload(fields)


def _short_payload(fields: dict[str, Any]) -> bytes:
    """Return as much as fits: of long texts the end of a path, the beginning of all others."""
    shapes, dtypes = fields.get("shapes", []), fields.get("dtypes", [])
    kept: dict[str, Any] = {key: fields[key] for key in ("group", "seq", "op", "reduce_op", "root") if key in fields}
    kept["site"] = fields.get("site", "")[-_MAX_CHARS:]
    kept["label"] = (fields.get("label") or "")[:_MAX_CHARS] or None
    if len(shapes) > _MAX_SHAPES:
        kept["pieces"] = f"{len(shapes)} tensors in all"
    short = {**kept, "shapes": shapes[:_MAX_SHAPES], "dtypes": dtypes[:_MAX_SHAPES]}
    payload = json.dumps(short, separators=(",", ":")).encode()
    return payload if len(payload) <= EVENT_BYTES else json.dumps({"group": "", "seq": 0, "op": fields["op"]}).encode()


def decode(entries: Iterable[tuple[int, int, bytes]]) -> list[Event]:
    """Return the newest events that follow each other, of (number, digest, bytes); what cannot be read is left out."""
    events: list[Event] = []
    for seq, digest, payload in entries:
        try:
            event = Event.from_dict({**parse_json(payload), "seq": seq})
        except (ValueError, TypeError):
            continue
        if events and events[-1].seq != seq - 1:
            events.clear()
        events.append(dataclasses.replace(event, digest=digest, read_source=_source(str(event.site))))
    return events


def _source(site: str) -> str:
    file, _, line = site.rpartition(" in ")[0].rpartition(":")
    is_line = line.isascii() and line.isdecimal()
    if not is_line or not os.path.isfile(file):  # another process names the file: it may be a device
        return ""
    return linecache.getline(file, int(line)).strip()
