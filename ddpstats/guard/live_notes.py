"""What each rank of this host is doing now: a small file per rank, which another process reads while training goes on.

The rank writes it in place, through memory: no lock, no wait, no call of the system. A file has two slots, which are
written in turn, each with its length and a CRC, so that one half written leaves the note before. Times are monotonic,
which all processes of a host have in common. Pure.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpstats._base.files import explain_version, open_regular, parse_json, read_at_most
from ddpstats._ranks.failure import ProcessId
from ddpstats.errors import ConfigError, DdpstatsError
from ddpstats.guard.event import Event, stable_hash
from ddpstats.guard.spoken import words_of
from ddpstats.guard.tidings import Tidings, clipped

FORMAT = 2
_LENGTH_AND_CRC = struct.Struct("@2Q")
_SLOT_BYTES = 1 << 16  # room for texts that are nothing but escapes; a note has some 700
_MOST_GROUPS = 16  # the first that the rank meets


class LiveNotes:
    """Those of this process, from now until it ends. Raises `ConfigError` where the file cannot be made.

    ``tidings``: what stands in them besides, once it listens.
    """

    def __init__(self, directory: str | Path, rank: int, world_size: int) -> None:
        path = Path(directory) / f"rank{rank}.live"
        new = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "w+b") as opened:
                opened.write(bytes(2 * _SLOT_BYTES))  # on a disk that is full this fails now, and no write later
                opened.flush()
                self._map: mmap.mmap | bytearray = mmap.mmap(file, 2 * _SLOT_BYTES)
            os.replace(new, path)  # not the same file: a process before this one may still write to that
        except OSError as error:
            with suppress(OSError):
                os.unlink(new)
            raise ConfigError(f"rank {rank} cannot write its notes to {directory}: {error.strerror}") from None
        process = {"process": ProcessId.mine().pack().hex(), "parent": os.getppid(), "started": time.monotonic()}
        self._head = {"live": FORMAT, "rank": rank, "world_size": world_size, **process}
        self._left = ""
        self.tidings = Tidings(self._retell)
        self._rest = self._spelled()
        self._event, self._groups = b"null", dict[bytes, int]()
        self._group_keys: dict[str, bytes] = {}
        self._steps: dict[int, int] = {}  # of each optimizer
        self._number = self._collectives = self._seq = self._most_steps = 0
        self._begun = self._waits_since = 0.0
        self._write()

    def begins(self, group: str, ranks: Collection[int], event: Event, seq: int) -> None:
        """About to issue a collective."""
        key = self._group_keys.get(group)
        if key is None:
            known_as = stable_hash(f"{group} of {list(ranks)}")
            key = self._group_keys[group] = b'"%d":[%d,' % (known_as, len(ranks))
        if key in self._groups or len(self._groups) < _MOST_GROUPS:
            self._groups[key] = seq
        self._collectives += 1
        self._seq, self._event, self._begun = seq, words_of(event).payload, time.monotonic()
        if self._left:
            self.left("")
        self._write()

    def waits(self, does: bool) -> None:
        """In a collective, for other ranks."""
        self._waits_since = time.monotonic() if does else 0.0
        self._write()

    def stepped(self, optimizer: object) -> None:
        """An optimizer has made a step; the one with the most of them counts."""
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        self._most_steps = max(self._most_steps, steps)
        self._write()

    def alarm(self, message: str) -> None:
        """A verdict of the guard's."""
        self.tidings.alarm("guard", message)

    def left(self, how: str) -> None:
        """This rank has left the guard."""
        self._left = clipped(how)
        self._retell()

    def disown(self) -> None:
        """In a process that was forked from the rank: the file is the rank's, and nobody sees what is noted here."""
        self._map = bytearray(2 * _SLOT_BYTES)

    def _retell(self) -> None:
        self._rest = self._spelled()
        self._write()

    def _write(self) -> None:
        self._number += 1
        note = b'{"numbers":[%d,%d,%d,%d,%d,%d,%d],"groups":{%b},"event":%b%b' % (
            *(self._number, self._collectives, self._seq, self._most_steps, self.tidings.renegotiations),
            *(self._begun * 1000, self._waits_since * 1000),
            b",".join([b"%b%d]" % held for held in self._groups.items()]),
            self._event,
            self._rest,
        )
        at = self._number % 2 * _SLOT_BYTES
        written = _LENGTH_AND_CRC.pack(len(note), zlib.crc32(note)) + note
        self._map[at : at + len(written)] = written

    def _spelled(self) -> bytes:
        """What seldom changes: the end of a note."""
        told = self.tidings
        texts = {"left": self._left, "new_keys": told.new_keys, "not_held": told.not_held, "alarms": told.alarms}
        return b"," + json.dumps({"head": self._head, "texts": texts}).encode()[1:]


_here: LiveNotes | None = None


def start(directory: str | Path) -> LiveNotes:
    """Of this process, whose rank torchrun has told. Raises `ConfigError` where they cannot be written."""
    global _here
    _here = LiveNotes(directory, int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    _here.tidings.subscribe()
    return _here


def here() -> LiveNotes | None:
    """Those of this process, if somebody wants any."""
    return _here


def _in_fork() -> None:
    global _here
    if _here is not None:
        _here.disown()
        _here = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)


# -- what another process reads ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankNow:
    """What a rank has noted last. ``process``: "stopped", "gone", or empty where it lives, or that is not known.

    ``begun``: monotonic seconds of the last collective; ``waits_since``: of a wait that goes on, else 0. ``groups``: of
    what it has issued something in: (how many ranks, number of the last collective).
    """

    rank: int
    world_size: int
    process: str = ""
    collectives: int = 0
    steps: int = 0
    renegotiations: int = 0
    begun: float = 0.0
    waits_since: float = 0.0
    groups: Mapping[str, tuple[int, int]] | None = None
    event: Event | None = None
    left: str = ""
    new_keys: str = ""
    not_held: str = ""
    alarms: tuple[str, ...] = ()


def read_notes(directory: str | Path) -> list[RankNow]:
    """Of the ranks of the newest run, by rank. What cannot be read is left out.

    Raises `DdpstatsError` where all are of another version, another machine, or another container.
    """
    found: list[tuple[float, int, RankNow]] = []
    refused: DdpstatsError | None = None
    for path in Path(directory).glob("rank*.live"):
        try:
            with open_regular(path, follow=False) as file:
                content = read_at_most(file, 2 * _SLOT_BYTES)
            notes = [note for at in (0, _SLOT_BYTES) if (note := _slot(content[at : at + _SLOT_BYTES])) is not None]
            newest = max(notes, key=lambda note: int(note["numbers"][0]))
            head = newest["head"]
            found.append((float(head["started"]), int(head["parent"]), _rank_now(newest)))
        except DdpstatsError as error:
            refused = error
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error):
            continue
    if refused is not None and not found:
        raise refused
    run = max(found, key=lambda one: one[0])[1] if found else 0
    return sorted((now for _, parent, now in found if parent == run), key=lambda now: now.rank)


def _slot(content: bytes) -> dict[str, Any] | None:
    """None for what is half written."""
    length, crc = _LENGTH_AND_CRC.unpack_from(content)
    note = content[_LENGTH_AND_CRC.size :][:length]
    return dict(parse_json(note)) if note and zlib.crc32(note) == crc else None


def _rank_now(note: Mapping[str, Any]) -> RankNow:
    head, texts = note["head"], note["texts"]
    refused, process = explain_version(head["live"], FORMAT), ProcessId.unpack(bytes.fromhex(head["process"]))
    if refused is not None or process.machine != ProcessId.mine().machine:
        raise DdpstatsError(f"these notes are {refused or 'of another machine, or container: watch the ranks there'}")
    _, collectives, seq, steps, renegotiations = map(int, note["numbers"][:5])
    begun, waits_since = (int(msec) / 1000 for msec in note["numbers"][5:])
    return RankNow(
        int(head["rank"]),
        int(head["world_size"]),
        _state_of(process),
        collectives,
        steps,
        renegotiations,
        begun,
        waits_since,
        {name: (int(size), int(number)) for name, (size, number) in note["groups"].items()},
        None if note["event"] is None else Event.from_dict({**note["event"], "seq": seq}),
        str(texts["left"]),
        str(texts["new_keys"]),
        str(texts["not_held"]),
        tuple(map(str, texts["alarms"])),
    )


def _state_of(process: ProcessId) -> str:
    if process.is_dead():
        return "gone"
    try:
        with open(f"/proc/{process.pid}/stat", "rb") as file:
            return "stopped" if file.read().rpartition(b")")[2].split()[0] in (b"T", b"t") else ""
    except (OSError, IndexError):
        return ""
