"""Collectives as records: what one rank did, in a form that other ranks can read, and a bounded ring of them.

A `Signature` holds what ranks must have in common; its fingerprint is stable across processes, hosts and runs (never
Python's own `hash`). An `Event` is one occurrence: where in the program, under which label, as which of its group.
While the program runs there is one for all calls that are equal, and of each call its number and time
(`NumberedEvent`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ddpstats._base.files import LATEST_TIME_SEC, parse_json
from ddpstats._base.text import printable
from ddpstats._ranks.exchange import fingerprint

MASK = (1 << 64) - 1
EVENT_BYTES = 992  # of one event in shared memory
_MAX_CHARS = 100  # of each text of an event that is too long for that
_PARTS_OF_0_1 = 10  # of the evidence for a label, as release 0.1.0 wrote it
_MOST_STREAMS = 100_000  # of messages of one peer and tag that are numbered


@dataclass(frozen=True)
class Signature:
    """The arguments that are the same on all ranks of a correct program, and the shapes.

    ``shapes`` and ``dtypes`` are of the tensors that must agree in dtype and number of elements: their shapes may
    differ. What may legally differ besides (the root's extra arguments, the pieces of an all_to_all) is not here but in
    the event's ``pieces``, and the names of tensors are in its ``word``.
    """

    op: str
    reduce_op: str | None = None
    root: int | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()  # empty where all tensors are contiguous

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each tensor."""
        return tuple(map(math.prod, self.shapes))

    def __str__(self) -> str:
        arguments = [f"{dtype}{list(shape)}" for shape, dtype in zip(self.shapes[:3], self.dtypes[:3], strict=True)]
        if self.strides:
            arguments = [f"{text} of strides {list(s)}" for text, s in zip(arguments, self.strides, strict=False)]
        if len(self.shapes) > 3:
            arguments.append(f"... {len(self.shapes)} tensors")
        if self.reduce_op is not None:
            arguments.append(self.reduce_op)
        if self.root is not None:
            arguments.append(f"root={self.root}")
        return printable([f"{self.op}({', '.join(arguments)})"])  # it may be from an untrusted file


def digest_of(signature: Signature) -> int:
    """Return 64 bits that are equal on all ranks of a correct program."""
    parts = (signature.op, signature.reduce_op, signature.root, signature.sizes, signature.dtypes, signature.strides)
    return stable_hash(repr(parts))


def stable_hash(text: str) -> int:
    return int.from_bytes(fingerprint(text.encode("utf-8", "surrogatepass")), "little")


MESSAGES = " (point-to-point)"  # after the name of a group
BY_TORCH = "(gradients)"  # the label of what torch's own code combines: DDP's buckets, FSDP's shards
_BY_TORCH_WORD = 2


def label_word(label: str | None) -> int:
    """Return 64 bits for a label: 0 for none, odd where it begins with a dict's key that is a number."""
    if label is None or label == BY_TORCH:
        return 0 if label is None else _BY_TORCH_WORD
    word = stable_hash(label) | 1
    return word if label.startswith("[") else word ^ 1 or 4


def same_labels(words: Iterable[int]) -> bool:
    """Return whether no two of these contradict each other.

    A label says under which name one rank's code reached a tensor. Another rank's code may legally reach its own
    without a name, or under a number where this one has a name: names are compared with names, numbers with numbers.
    What torch issues by itself agrees only with what torch issues by itself.
    """
    known = set(words)
    if _BY_TORCH_WORD in known:
        return len(known) == 1
    known.discard(0)
    return len(known) < 2 or (len(known) == 2 and sum(word & 1 for word in known) == 1)


def roll(rolling: int, digest: int) -> int:
    """Return the rolling digest of a sequence, one event later. Depends on the order."""
    return ((rolling ^ digest) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK


@dataclass(frozen=True)
class Evidence:
    """The evidence for a label that was inferred: where its name comes from, and what becomes of the result.

    ``key``: the innermost name in it. ``names``: all names in the container that it is from, in its order; empty where
    they are not known. ``source``: that container's class. ``use``: what the program does with the result: "stored"
    under the name, written into the "element" itself, "pooled" with others, or "". ``aliases``: other names of the same
    tensor there. ``set_by``: a "loop" set the name, or the program's "text". ``outer``: of the container's name in the
    one around it.
    """

    key: str
    names: tuple[str, ...] = ()
    source: str = ""
    use: str = ""
    aliases: tuple[str, ...] = ()
    set_by: str = "loop"
    outer: Evidence | None = None

    def as_list(self, before: Evidence | None = None) -> list[Any]:
        """Return it for JSON. ``before``: of the event before; names that it has, too, are left out (None)."""
        names = None if before is not None and before.names == self.names else self.names
        outer = None if self.outer is None else self.outer.as_list(before and before.outer)
        return [self.key, names, self.source, self.use, self.aliases, self.set_by, outer]

    @classmethod
    def from_list(cls, parts: Any, before: Evidence | None = None) -> Evidence:
        """Return what `as_list`, here or in release 0.1.0, made a list of, with the same ``before``.

        Raises ValueError or TypeError for other input.
        """
        if len(parts) == _PARTS_OF_0_1:
            key, names, source, fate, _, aliases, _, _, chosen_by, outer = parts
            use = {"keyed": "stored", "in place": "element", "pooled": "pooled"}.get(text_of(fate), "")
            set_by = {"sorted": "loop", "caller": "text"}.get(text_of(chosen_by), chosen_by)
        else:
            key, names, source, use, aliases, set_by, outer = parts
        names = (before.names if before else ()) if names is None else names
        for text in (key, source, use, set_by, *names, *aliases):
            text_of(text)
        outer = None if outer is None else cls.from_list(outer, before and before.outer)
        return cls(key, tuple(names), source, use, tuple(aliases), set_by, outer)


@dataclass(slots=True)
class Event:
    """One collective of one rank. ``site`` is "file:line in function" of the calling code.

    ``word`` is 0 where the label is not compared. ``evidence_source``: the `Evidence` for a label that was inferred, or
    an object that works it out when asked for its ``evidence``.
    """

    group: str
    seq: int
    signature: Signature
    label: str | None
    word: int  # of the label
    site: Any  # text, or an object whose str() is the text, made only when it is read
    digest: int
    pieces: str = ""
    balance: int = 0
    peer: int | None = None
    tag: int | None = None
    started: float = 0.0
    read_source: str = ""
    evidence_source: Any = None
    encoded: bytes = field(default=b"", compare=False, repr=False)  # see `encode`

    @property
    def evidence(self) -> Evidence | None:
        """None for a label that the program itself gave."""
        evidence: Evidence | None = getattr(self.evidence_source, "evidence", self.evidence_source)
        return evidence

    @property
    def source(self) -> str:
        """The line of the call site; empty where it is not known."""
        return self.read_source if isinstance(self.site, str) else str(self.site.source())

    def as_dict(self, before: Evidence | None = None) -> dict[str, Any]:
        """Return the fields that are not empty, for JSON. ``before``: the evidence of the event before."""
        evidence = self.evidence if self.word else None
        fields = {
            "group": self.group,
            "seq": self.seq,
            **vars(self.signature),
            "label": self.label,
            "site": str(self.site),
            "source": self.source,
            "pieces": self.pieces,
            "balance": self.balance or None,
            "peer": self.peer,
            "tag": self.tag,
            "time": self.started,
            "evidence": evidence.as_list(before) if evidence is not None else None,
            "is_silenced": (not self.word and self.label is not None) or None,
        }
        return {key: value for key, value in fields.items() if value not in (None, "", ())}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any], before: Evidence | None = None) -> Event:
        """Raises ValueError for what `as_dict`, with the same ``before``, did not write."""
        try:
            signature = msgspec.convert(entry, Signature)
            if len(signature.shapes) != len(signature.dtypes):
                raise ValueError("as many shapes as dtypes are needed")
            started = float(entry.get("time", 0.0))
            if not 0 <= started < LATEST_TIME_SEC:
                raise ValueError("no time")
            label = msgspec.convert(entry.get("label"), str | None)
            return cls(
                group=text_of(entry["group"]),
                seq=int(entry["seq"]),
                signature=signature,
                label=label,
                word=0 if entry.get("is_silenced") else label_word(label),
                site=line_of(entry.get("site", "")),
                digest=digest_of(signature),
                pieces=line_of(entry.get("pieces", "")),
                balance=int(entry.get("balance", 0)),
                peer=msgspec.convert(entry.get("peer"), int | None),
                tag=msgspec.convert(entry.get("tag"), int | None),
                started=started,
                read_source=line_of(entry.get("source", "")),
                evidence_source=Evidence.from_list(entry["evidence"], before) if "evidence" in entry else None,
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a record of a collective: {error!r}") from None

    @property
    def is_message(self) -> bool:
        return self.signature.op in ("send", "recv")

    def __str__(self) -> str:
        named = f" {self.label!r}" if self.label else ""
        towards = "to" if self.signature.op == "send" else "from"
        peer = f" {towards} rank {self.peer}, tag {self.tag}" if self.peer is not None else ""
        signature = self.signature
        if self.pieces:  # which have the shapes and dtypes
            signature = dataclasses.replace(signature, shapes=(), dtypes=())
        return f"{signature}{named}{peer}"

    def in_full(self, group_words: str = "") -> str:
        """Return the event in words, with its number in the group and its call site."""
        number = "" if self.is_message else f"number {self.seq}{group_words and f' of {group_words}'}, "
        return f"{number}{self}{self.at}"

    @property
    def at(self) -> str:
        """The call site as the end of a sentence; empty where it is not known."""
        site = str(self.site)
        return f", at {site}" if site else ""

    def site_lines(self) -> list[str]:
        """Return lines for a message: the call site, and its line of the program if that is known."""
        site, source = str(self.site), self.source
        return [*([f"      at {site}"] if site else []), *([f"         {source}"] if source else [])]


def text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text is needed, not {type(value).__name__}")
    return value


def line_of(value: Any) -> str:
    """Return text from an untrusted file in a form that cannot begin another line of a report."""
    return printable([text_of(value)])


def encode(event: Event) -> bytes:
    """Return the event without its number, for shared memory. Its label is shown, and not compared.

    That costs as much as some small collectives, and a program issues the same few again and again: the event keeps it.
    """
    if not event.encoded:
        plain = dataclasses.replace(event, seq=0, started=0.0, word=0, evidence_source=None)
        event.encoded = _as_bytes(plain)
        if len(event.encoded) > EVENT_BYTES:
            signature = dataclasses.replace(event.signature, shapes=(), dtypes=(), strides=())
            label, site = (event.label or "")[:_MAX_CHARS] or None, str(event.site)[-_MAX_CHARS:]
            pieces = f"{len(event.signature.shapes)} tensors in all"
            event.encoded = _as_bytes(Event(event.group, 0, signature, label, 0, site, 0, pieces))
    return event.encoded


def _as_bytes(event: Event) -> bytes:
    return json.dumps(event.as_dict(), separators=(",", ":")).encode("utf-8", "surrogateescape")


def decode(entries: Iterable[tuple[int, int, bytes]]) -> tuple[Event, ...]:
    """Return the newest events that follow each other, of (number, digest, bytes); what cannot be read is left out."""
    events = []
    for seq, digest, encoded in entries:
        with suppress(ValueError, TypeError):
            event = Event.from_dict({**parse_json(encoded), "seq": seq})
            events.append(dataclasses.replace(event, digest=digest))
    return newest_in_a_row(events)


def as_dicts(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """Yield each for JSON, without the names in its evidence that the one before it has."""
    before = None
    for event in events:
        yield event.as_dict(before)
        before = event.evidence if event.word else before


def from_dicts(entries: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """Raises ValueError for what `as_dicts` did not yield."""
    before = None
    for entry in entries:
        event = Event.from_dict(entry, before)
        before = event.evidence or before
        yield event


def newest_in_a_row(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return the events after the last gap in the numbers: an earlier guard of the process may have left the others."""
    newest: list[Event] = []
    for event in events:
        if newest and event.seq != newest[-1].seq + 1:
            newest.clear()
        newest.append(event)
    return tuple(newest)


class MessageNumbers:
    """Numbers one rank's messages: the n-th send and the n-th receive of two ranks and one tag belong together."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int | None, int | None]] = Counter()
        self._from_any: set[tuple[str, int | None]] = set()
        self.seen = 0

    def next(self, event: Event) -> int:
        """Return the message's number; 0 where it cannot be known which message a receive takes, or tags are many.

        A receive that names no sender may take any message of its tag, and so may those after it.
        """
        self.seen += 1
        op, stream = event.signature.op, (event.group, event.tag)
        if op == "recv" and event.peer is None:
            self._from_any.add(stream)
        if op == "recv" and stream in self._from_any:
            return 0
        key = event.group, op, event.peer, event.tag
        if key not in self._counts and len(self._counts) >= _MOST_STREAMS:
            return 0
        self._counts[key] += 1
        return self._counts[key]


# The event that all equal calls share, with the number and the time of one of them.
NumberedEvent = tuple[Event, int, float]


def event_of(entry: NumberedEvent) -> Event:
    event, seq, started = entry
    return dataclasses.replace(event, seq=seq, started=started)


class Ring:
    """The newest calls, oldest first."""

    def __init__(self, capacity: int) -> None:
        self._entries: deque[NumberedEvent] = deque(maxlen=capacity)
        self.append = self._entries.append

    def of(self, group: str) -> list[Event]:
        """Return the group's events, with number and time."""
        entries = self._entries.copy()  # in one step, whatever other threads add
        return [event_of(entry) for entry in entries if entry[0].group == group]

    def silence(self, group: str, numbers: Collection[int]) -> list[Event]:
        """Compare the labels of these calls, and of all that are equal, no more. Return their events."""
        entries = self._entries.copy()
        events = [event for event, seq, _ in entries if event.group == group and seq in numbers]
        for event in events:
            event.word = 0
        return events

    def last(self) -> Event | None:
        """Return the newest event."""
        return event_of(self._entries[-1]) if self._entries else None
