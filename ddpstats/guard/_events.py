"""Records of collectives: what one rank did, a bounded ring of them, and per-rank files of JSON lines.

A `Signature` holds what ranks must have in common; its fingerprint is stable across processes, hosts and runs (never
Python's own `hash`). An `Event` is one occurrence: where in the program, under which label, as which of its group.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpstats.errors import ConfigError

FORMAT = 1
_MASK = (1 << 64) - 1
_MAX_LINE_BYTES = 1 << 20
_MAX_LEVELS = 64


@dataclass(frozen=True)
class Signature:
    """What is the same on all ranks of a correct program.

    What a tensor was called is not part of it: see `label_word`. ``shapes`` and ``dtypes`` are of the tensors that must
    agree; what may legally differ (the root's extra arguments, the pieces of an all_to_all) is not here but in the
    event's ``pieces``.
    """

    op: str
    reduce_op: str | None = None
    root: int | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()  # empty where all tensors are contiguous

    def __str__(self) -> str:
        given = [f"{dtype}{list(shape)}" for shape, dtype in zip(self.shapes[:3], self.dtypes[:3], strict=True)]
        if self.strides:
            given = [f"{text} of strides {list(strides)}" for text, strides in zip(given, self.strides, strict=False)]
        if len(self.shapes) > 3:
            given.append(f"... {len(self.shapes)} tensors")
        if self.reduce_op is not None:
            given.append(self.reduce_op)
        if self.root is not None:
            given.append(f"root={self.root}")
        return f"{self.op}({', '.join(given)})"


def digest_of(signature: Signature) -> int:
    """64 bits that stand for a signature."""
    parts = (signature.op, signature.reduce_op, signature.root, signature.shapes, signature.dtypes, signature.strides)
    return stable_hash(repr(parts))


def stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


BY_TORCH = "(gradients)"  # the label of what torch's own code issues: DDP's buckets, FSDP's shards
_BY_TORCH_WORD = 2


def label_word(label: str | None) -> int:
    """64 bits that stand for a label; 0 for none, odd for an index."""
    if label is None or label == BY_TORCH:
        return 0 if label is None else _BY_TORCH_WORD
    word = stable_hash(label) | 1
    return word if label.startswith("[") else word ^ 1 or 4


def same_labels(words: Iterable[int]) -> bool:
    """Whether no two of these contradict each other.

    A label says under which name one rank's code reached a tensor. Another rank's code may legally reach its own
    without a name, or count where this one names, so names are compared among each other, and indices. What torch
    issues by itself meets only its like.
    """
    known = set(words)
    if _BY_TORCH_WORD in known:
        return len(known) == 1
    known.discard(0)
    return len(known) < 2 or (len(known) == 2 and sum(word & 1 for word in known) == 1)


def roll(rolling: int, digest: int) -> int:
    """The rolling digest of a sequence, one event later. Depends on the order."""
    return ((rolling ^ digest) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK


@dataclass(frozen=True)
class Evidence:
    """What is known of a label that was inferred, besides its text.

    ``key``: the innermost name in it. ``names``: all names in the container that it is from, in its order; empty where
    they are not known. ``source``: that container's class. ``fate``: what the program does with the result.
    ``spelled``: the program's text has the name, "whole" or in "parts", or "". ``is_beside``: the name was only passed
    beside the tensor. ``is_known``: a function of a name like ``reduce_dict`` called the collective. ``aliases``: other
    names of the same tensor there. ``chosen_by``: "loop" where a loop sets the name, or the text spells it out;
    "caller" where a parameter does; else "", a single look-up. ``outer``: of the name of that container in the one
    around it.
    """

    key: str
    names: tuple[str, ...] = ()
    source: str = ""
    fate: str = "unused"
    spelled: str = ""
    aliases: tuple[str, ...] = ()
    is_beside: bool = False
    is_known: bool = False
    outer: Evidence | None = None
    chosen_by: str = "loop"

    def as_list(self, before: Evidence | None = None) -> list[Any]:
        """For `from_list`, with the same ``before``: the evidence of the event before, whose names are not repeated."""
        names = None if before is not None and before.names == self.names else list(self.names)
        outer = None if self.outer is None else self.outer.as_list(None if before is None else before.outer)
        flags = [self.is_beside, self.is_known, self.chosen_by]
        return [self.key, names, self.source, self.fate, self.spelled, list(self.aliases), *flags, outer]

    @classmethod
    def from_list(cls, given: Any, before: Evidence | None = None, depth: int = 0) -> Evidence:
        """Raises ValueError or TypeError for what `as_list` did not give."""
        key, names, source, fate, spelled, aliases, is_beside, is_known, chosen_by, outer = given
        if depth > _MAX_LEVELS:
            raise ValueError("nested too deep")
        return cls(
            _text(key),
            tuple(map(_text, names)) if names is not None else () if before is None else before.names,
            _text(source),
            _text(fate),
            _text(spelled),
            tuple(map(_text, aliases)),
            bool(is_beside),
            bool(is_known),
            None if outer is None else cls.from_list(outer, None if before is None else before.outer, depth + 1),
            _text(chosen_by),
        )


@dataclass(slots=True)
class Event:
    """One collective of one rank. ``site`` is "file:line in function" of the calling code.

    ``word`` is 0 where the label is not compared. ``told``: the `Evidence` for a label that was inferred, or a function
    that gives it: most is worked out only where ranks differ.
    """

    group: str
    seq: int
    signature: Signature
    label: str | None
    word: int  # of the label
    site: Any  # text, or an object whose str() is the text: spelled out only when somebody reads it
    digest: int
    pieces: str = ""
    balance: int = 0
    peer: int | None = None
    tag: int | None = None
    started: float = 0.0
    read_source: str = ""
    told: Evidence | Callable[[], Evidence] | None = None

    @property
    def evidence(self) -> Evidence | None:
        """None for a label that the program itself gave."""
        return self.told() if callable(self.told) else self.told

    @property
    def source(self) -> str:
        """The line of the call site; empty where it is not known."""
        return self.read_source if isinstance(self.site, str) else str(self.site.source())

    def as_dict(self, before: Evidence | None = None) -> dict[str, Any]:
        """``before``: the evidence of the event before, where both go the same way."""
        evidence = self.evidence if self.word else None
        found = {
            "group": self.group,
            "seq": self.seq,
            "op": self.signature.op,
            "reduce_op": self.signature.reduce_op,
            "root": self.signature.root,
            "shapes": [list(shape) for shape in self.signature.shapes],
            "dtypes": list(self.signature.dtypes),
            "strides": [list(strides) for strides in self.signature.strides],
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
        return {key: value for key, value in found.items() if value not in (None, "", [])}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], before: Evidence | None = None) -> Event:
        """Raises ValueError for what `as_dict` did not write."""
        try:
            signature = Signature(
                _text(given["op"]),
                _text_or_none(given.get("reduce_op")),
                _int_or_none(given.get("root")),
                tuple(tuple(int(size) for size in shape) for shape in given.get("shapes", [])),
                tuple(_text(dtype) for dtype in given.get("dtypes", [])),
                tuple(tuple(int(size) for size in strides) for strides in given.get("strides", [])),
            )
            if len(signature.shapes) != len(signature.dtypes):
                raise ValueError("as many shapes as dtypes are needed")
            label = _text_or_none(given.get("label"))
            return cls(
                group=_text(given["group"]),
                seq=int(given["seq"]),
                signature=signature,
                label=label,
                word=0 if given.get("is_silenced") else label_word(label),
                site=_text(given.get("site", "")),
                digest=digest_of(signature),
                pieces=_text(given.get("pieces", "")),
                balance=int(given.get("balance", 0)),
                peer=_int_or_none(given.get("peer")),
                tag=_int_or_none(given.get("tag")),
                started=float(given.get("time", 0.0)),
                read_source=_text(given.get("source", "")),
                told=Evidence.from_list(given["evidence"], before) if "evidence" in given else None,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a record of a collective: {error!r}") from None

    def __str__(self) -> str:
        named = f" {self.label!r}" if self.label else ""
        peer = f" with rank {self.peer}, tag {self.tag}" if self.peer is not None else ""
        return f"{self.signature}{named}{peer}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text is needed, not {value!r}")
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _int_or_none(value: Any) -> int | None:
    return None if value is None else int(value)


def events_as_dicts(events: Iterable[Event]) -> list[dict[str, Any]]:
    found, before = [], None
    for event in events:
        found.append(event.as_dict(before))
        before = event.evidence if event.word else before
    return found


def events_from_dicts(given: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """Raises ValueError for what `events_as_dicts` did not give."""
    before = None
    for entry in given:
        event = Event.from_dict(entry, before)
        before = event.evidence or before
        yield event


class Ring:
    """The newest events, oldest first."""

    def __init__(self, capacity: int) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self.append = self._events.append

    def of(self, group: str) -> list[Event]:
        while True:
            try:
                return [event for event in list(self._events) if event.group == group]
            except RuntimeError:  # another thread has added one meanwhile
                continue

    def last(self) -> Event | None:
        return self._events[-1] if self._events else None

    def __len__(self) -> int:
        return len(self._events)


# -- files ------------------------------------------------------------------------------------------------------------


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
                    groups[_text(entry["new_group"])] = entry
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
