"""Every error about a missing, dead or late rank is decided and worded here: one failure, one verdict on all ranks.

1. Each rank writes into the store which process it is. Ranks of one host see each other's processes live and die.
2. `FailureDetector.rendezvous`: before a group's first collective every rank waits until all have written that.
3. `poll`: a rank that waits in a collective looks whether a rank raised an alarm, or a process of its host died.
4. `decide`: the first rank whose collective failed raises the alarm. Every rank that waits then reports the number of
   its collective, and the ranks of its host that it sees alive. A verdict is due at once where a process is dead,
   shortly after a connection broke, and otherwise at the deadline (`find_missing`).
5. `FailureRound`: one rank judges by the reports, and the first verdict that is written is that of all ranks, also of a
   late one at its next call. Any other alarm between ranks uses the same class.

One thread of one process answers the requests of all ranks. So one rank reads the reports, and another one only where
no verdict comes; and the more ranks there are, the less often each of them asks.

The store is a helper, never a dependency. Where it is gone or silent, each rank concludes what it can see by itself
(`Membership.diagnose_without_store`). Where no rank can be named, `Verdict.missing` is empty.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import msgspec

from ddpstats._base.files import parse_json
from ddpstats._base.text import first_line, ranks_text
from ddpstats._ranks.store import (
    STORE_ERRORS,
    BoundedStore,
    StoreLog,
    StoreSilent,
    bounded,
    growing_polls,
    shared_poll,
    wait_for,
)
from ddpstats.errors import ConfigError

_POLL_SEC = 0.05
_LOOK_SEC = 0.5  # between two looks for processes that died during the rendezvous
_GLANCE_SEC = 1.0
_BROKEN_SEC = 2.5  # from a broken connection to the verdict: for the answers of all ranks that wait
_YIELD_SEC = 0.5  # after that, for the verdict of the rank that reads the answers
_LEAVE_SEC = 5.0
_LINGER_SEC = 2.0  # of the rank that serves the store
_WRITE_SEC = 2.0  # for a store that is slow
_DYING_SEC = 1.0  # a process that is killed closes its connections a moment before it is gone
_BROKEN, _LATE = "broken", "late"  # why a collective failed, as the first rank saw it
IS_GONE, IS_ABSENT = "the process is gone", "did not take part"  # the words of all errors about a missing rank
SLOW = "A rank that is only slow needs a larger"  # then: which timeout

# What a backend says of another rank. A rank that ends closes its connections (`CLOSED`); one that is late does not.
# `LOST` holds both, and is for errors that a backend is known to have raised. `LOST_BY_BACKEND` is what only backends
# say, so that no error of the program is taken for it: gloo names the file in which it raises (torch 2.13). NCCL's
# ``ncclUnhandledCudaError`` is of this rank's own device.
_NCCL = "ncclRemoteError|NCCL operations have failed|communicator was aborted|collective operation timeout"
CLOSED = re.compile(r"(clos|reset)\w* by (remote )?peer|connection (was )?(closed|reset)|broken pipe", re.IGNORECASE)
LOST = re.compile(rf"{CLOSED.pattern}|{_NCCL}|timed out|pair closure|monitoredBarrier|ncclSystemError", re.IGNORECASE)
LOST_BY_BACKEND = re.compile(rf"gloo/transport|closed by remote peer|{_NCCL}", re.IGNORECASE)


def nccl_reason(text: str) -> str:
    """Return what NCCL gives as the reason for an aborted communicator; all of the text where it gives none."""
    return text.rpartition("Original reason for failure was:")[2]


# -- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessId:
    """A process, recognisable by other processes of the same machine and PID namespace."""

    machine: bytes
    pid: int
    started: int

    @classmethod
    def mine(cls) -> ProcessId:
        return cls(_machine(os.getpid()), os.getpid(), _start_time(os.getpid()) or 0)

    def pack(self) -> bytes:
        return _PROCESS_ID.pack(self.machine, self.pid, self.started)

    @classmethod
    def unpack(cls, payload: bytes) -> ProcessId:
        return cls(*_PROCESS_ID.unpack(payload))

    def is_dead(self) -> bool:
        """True only where this host can know: same machine, and the process is gone or a zombie."""
        return self._is_visible() and _start_time(self.pid) != self.started

    def is_alive(self) -> bool:
        """True only where this host can know."""
        return self._is_visible() and _start_time(self.pid) == self.started

    def _is_visible(self) -> bool:
        return self.started != 0 and self.machine == _machine(os.getpid())


_PROCESS_ID = struct.Struct("<16sqq")
PROCESS_ID_BYTES = _PROCESS_ID.size


@functools.lru_cache(maxsize=1)
def _machine(pid: int) -> bytes:
    """Return 16 bytes for this boot of this machine and the namespaces of this process; zeros if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        namespaces = os.readlink("/proc/self/ns/pid") + os.readlink("/proc/self/ns/net")
        return hashlib.blake2b(boot + namespaces.encode(), digest_size=16).digest()
    except OSError:
        return bytes(16)


def _start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None if it has ended, a zombie included."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


class StoreLoss(NamedTuple):
    """The conclusion of a rank when the store is gone. ``line``: the same on all ranks that know the same."""

    missing: tuple[int, ...]
    line: str
    why: str

    def message(self, head: Iterable[str], closing: str = "") -> str:
        """Return the error's text. ``head``: lines that say what was not completed; ``closing``: its last sentence."""
        whose = "their output" if self.missing else "the output of all ranks"
        advice = f"Look at {whose} and at the network first. {closing}".rstrip()
        cause = f"The store, which could say which rank is missing, does not answer: {self.why}"
        return "\n".join([*head, self.line, advice, cause])


class Membership:
    """The ranks of one group, and the processes of those on this host, as far as they are known."""

    def __init__(
        self, store: BoundedStore, rank: int, ranks: Iterable[int], peers: Mapping[int, ProcessId] | None = None
    ) -> None:
        # Plain numbers: keys are made of them, and a `Rank` prints its group rank as well.
        self.store, self.rank, self.ranks = store, int(rank), tuple(map(int, ranks))
        self.peers = dict(peers or {})
        self._is_complete = False  # all ranks have joined, and those of this host are known
        self._read_at = -math.inf  # when their processes were read last

    def join(self) -> None:
        """Write which process this rank is."""
        self.store.set(f"here/{self.rank}", "")
        self._host_log.append(self.rank, ProcessId.mine().pack())
        if self.store.add("here", 1) >= len(self.ranks) and not self.absent():
            self.store.set("all here", "1")

    @functools.cached_property
    def _host_log(self) -> StoreLog:
        # Not "host/", where release 0.1.0 has notes of another form: ranks of both versions come to the handshake.
        return StoreLog(self.store, f"processes/{ProcessId.mine().machine.hex()}")

    def absent(self) -> list[int]:
        """Return the ranks that have not joined."""
        keys = self.store.absent([f"here/{rank}" for rank in self.ranks])
        return [int(key.removeprefix("here/")) for key in keys]

    def learn(self, look_sec: float = 0.0) -> bool:
        """Read the processes of the ranks of this host that have joined; return whether all ranks have. Never waits.

        ``look_sec``: until all have, they are read no more often than that.
        """
        if not self._is_complete:
            have_all_joined = self.store.check(["all here"])
            if not have_all_joined and time.monotonic() < self._read_at + look_sec:
                return False
            self._read_at = time.monotonic()
            for rank, process in self._host_log.unread().items():
                if len(process) == PROCESS_ID_BYTES and rank != self.rank:
                    self.peers[rank] = ProcessId.unpack(process)
            self._is_complete = have_all_joined
        return self._is_complete

    def set_processes(self, processes: Mapping[int, ProcessId]) -> None:
        """Set the processes of all ranks, as they sent them."""
        machine = ProcessId.mine().machine
        self.peers = {
            rank: process for rank, process in processes.items() if process.machine == machine and rank != self.rank
        }
        self._is_complete = True

    def dead(self, ranks: Collection[int] | None = None) -> set[int]:
        """Return the ranks of this host whose process is gone, of these ``ranks`` if given. Asks no store."""
        return set(self._matching_peers(ProcessId.is_dead, ranks))

    def alive(self) -> list[int]:
        """Return this rank and the ranks of this host whose process is alive. Asks no store."""
        return [self.rank, *self._matching_peers(ProcessId.is_alive)]

    def _matching_peers(self, holds: Callable[[ProcessId], bool], ranks: Collection[int] | None = None) -> list[int]:
        """Look at each process once: ranks that are threads of one process would take turns for its files."""
        # A copy, for another thread may be in `learn`.
        peers = {rank: process for rank, process in self.peers.copy().items() if ranks is None or rank in ranks}
        matching = set(filter(holds, set(peers.values())))
        return [rank for rank, process in peers.items() if process in matching]

    def diagnose_without_store(
        self,
        error: BaseException,
        ranks: Collection[int] | None = None,
        name: Callable[[Collection[int]], str] = ranks_text,
    ) -> StoreLoss:
        """Return what this rank can conclude when the store is gone.

        ``error``: what the request to the store raised. ``ranks``: those that this rank waits for, by default all.
        """
        waited_for = set(self.ranks if ranks is None else ranks)
        host, is_silent = self.store.host_rank, isinstance(error, StoreSilent)
        until = time.monotonic() + (0.0 if is_silent else _DYING_SEC)
        while True:
            dead, is_host_alive = self.dead(waited_for), host in self.alive()
            is_certain = host in dead or (not is_host_alive and (bool(dead) or host in waited_for))
            if is_certain or time.monotonic() >= until:
                break
            time.sleep(_POLL_SEC)
        is_left = not is_silent and host in waited_for and not is_host_alive
        if host is not None and host in dead:
            missing, how = {host}, "is gone, and the store with it"
        elif dead and not is_left:
            missing, how = dead, IS_GONE
        elif host is not None and host != self.rank:
            missing = {host}
            how = "serves the store, which does not answer" if is_silent else "serves the store no more"
        else:
            return StoreLoss((), "  which rank is missing cannot be determined", first_line(error))
        return StoreLoss(tuple(sorted(missing)), f"  {name(missing)}: {how}", first_line(error))


# -- verdicts ---------------------------------------------------------------------------------------------------------


T = TypeVar("T", bound="Packed")


class Packed:
    """A dataclass that travels through the store as JSON, and is trusted by no reader."""

    max_bytes = 4 << 20

    def pack(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def unpack(cls: type[T], payload: bytes | str) -> T:
        """Read what `pack` wrote; raises ValueError for any other bytes."""
        if len(payload) > cls.max_bytes:
            raise ValueError(f"{len(payload):,} bytes are too many for a {cls.__name__}")
        return cls.from_json(parse_json(payload))

    @classmethod
    def from_json(cls: type[T], values: Any) -> T:
        """Check these values of JSON, and return the object; raises ValueError where they do not fit."""
        return msgspec.convert(values, cls, str_keys=True)


@dataclass(frozen=True)
class Verdict(Packed):
    """The error that all ranks raise. ``missing``: global ranks; empty where no rank can be named."""

    max_bytes = 1 << 20
    missing: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Answer(Packed):
    """One rank's answer to a failure: ``seq`` of the collective in which it waits, and the ranks that it sees alive.

    ``note``: what it has noted for the errors of others, if anything (`FailureDetector.note`).
    """

    seq: int
    alive: tuple[int, ...]
    note: str = ""


def find_missing(
    ranks: Iterable[int], seq: int, answers: Mapping[int, Answer], *, is_over: bool
) -> tuple[int, ...] | None:
    """Return the ranks that are missing from collective ``seq``; None while that cannot be known.

    A rank that waits in this collective or a later one is not missing. Before the deadline ``is_over``, when all ranks
    that wait have answered to a connection that broke, a rank is not missing either that may only be late: one that
    waits elsewhere, or that a rank of its host sees alive. At least one of the others is gone.
    """
    missing = tuple(rank for rank in ranks if rank not in answers or answers[rank].seq < seq)
    if is_over or not missing:
        return missing
    seen = set(answers).union(*(answer.alive for answer in answers.values()))
    return tuple(rank for rank in missing if rank not in seen) or None


class FailureRound:
    """One failure, and how all ranks come to one verdict on it through the store.

    1. The first rank that sees it raises the alarm, which says what failed. Each rank that waits reports what it knows.
    2. The first rank that has reported judges by the reports once a verdict is due; another one where it does not.
    3. The first verdict that is written is that of all ranks. They count themselves as readers: a rank whose end would
       end the store, or other ranks, waits a moment for them.

    ``alarm`` and ``verdict`` are None until this rank has read them. Several threads may use one object.
    """

    def __init__(self, store: BoundedStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self.alarm: bytes | None = None
        self.verdict: bytes | None = None
        self.has_reported = self._has_counted = False
        self._is_judge: bool | None = None  # None: not asked yet

    def raise_alarm(self, alarm: str) -> bytes:
        """Raise the alarm unless one is on; return the one that is."""
        self.alarm = self.alarm or self._store.post("alarm", alarm)
        return self.alarm

    def find_alarm(self) -> bytes | None:
        """Return the alarm if one is on."""
        self.alarm = self.alarm or self._store.find("alarm")
        return self.alarm

    def report(self, report: str) -> None:
        """Report what this rank knows; waits for no rank."""
        self.has_reported = True
        StoreLog(self._store, "report").append(self._rank, report)

    def turns(
        self, due: float, polls: Iterable[float], yield_sec: float = _YIELD_SEC
    ) -> Iterator[dict[int, bytes] | None]:
        """Yield now and then until there is a verdict: by rank the new reports where this rank is to judge, or None.

        The judge is to do so from ``due`` on, any other rank ``yield_sec`` later.
        """
        log = StoreLog(self._store, "report")
        for poll_sec in polls:
            if self.find_verdict() is not None:
                return
            late_sec = time.monotonic() - due
            if self._is_judge is None and (self.has_reported or late_sec >= 0.0):
                self._is_judge = self._store.post("judge", str(self._rank)) == str(self._rank).encode()
            is_mine = late_sec >= (0.0 if self._is_judge else yield_sec)
            yield log.unread() if is_mine else None
            time.sleep(poll_sec)

    def find_verdict(self) -> bytes | None:
        """Return the verdict if a rank has written one."""
        self.verdict = self.verdict or self._store.find("verdict")
        return self.verdict

    def write(self, verdict: str) -> bytes:
        """Write the verdict unless there is one; return the one that holds."""
        self.verdict = self._store.post("verdict", verdict)
        return self.verdict

    def write_later(self, verdict: str, alarm: str) -> None:
        """Write both when the store answers, if it ever does: for a rank that was stopped, and serves it."""
        self._store.post_later("verdict", verdict)
        self._store.post_later("alarm", alarm)

    def count_as_reader(self) -> bool:
        """Count this rank among those that have the verdict; return whether it was not counted yet."""
        if self._has_counted:
            return False
        self._has_counted = True
        self._store.add("read", 1)
        return True

    def linger(self, readers: int, limit_sec: float, poll_sec: float) -> None:
        """Count this rank as a reader, and wait a moment until so many ranks are."""
        self.count_as_reader()
        wait_for(lambda: self._store.counted("read") >= readers, limit_sec, poll_sec)


class FailureDetector:
    """One rank's access to the verdict on its group. ``what``: the operation, for messages."""

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Iterable[int],
        what: str,
        *,
        timeout_name: str = "timeout_sec (or DDPSTATS_TIMEOUT_SEC)",
        closing: str = "",
        peers: Mapping[int, ProcessId] | None = None,
    ) -> None:
        """``closing``: the last sentence of each message."""
        self.store = bounded(store)
        self._names = {int(member): member for member in ranks}
        self.members = Membership(self.store, rank, self._names, peers)
        self.rank, self.ranks = self.members.rank, self.members.ranks
        self._what, self._timeout_name, self._closing = what, timeout_name, closing
        self._failure, self._polls_at = FailureRound(self.store, self.rank), 0.0
        self.own_note: dict[int, str] = {}  # by this rank

    # -- waiting ------------------------------------------------------------------------------------------------------

    def rendezvous(self, deadline: float, longest_poll_sec: float) -> Verdict | None:
        """Join and wait for all other ranks; a verdict if one of them does not come before ``deadline``, or cannot."""
        started = time.monotonic()
        reason = "this was the first use of the group, and not all ranks came"
        try:
            with self.store.within(max(0.0, deadline - started) + 2 * _YIELD_SEC + _WRITE_SEC):
                self.members.join()
                polls = growing_polls(shared_poll(min(longest_poll_sec, _LOOK_SEC), len(self.ranks)))
                for reports in self._failure.turns(deadline, polls):
                    if self.members.learn(_LOOK_SEC):
                        return self.read()
                    if dead := self.members.dead():
                        return self._write(dead, dead, started, reason)
                    if reports is not None:
                        missing = self.members.absent()  # none where the last to come could not write that it did
                        return self._write(missing, (), started, reason) if missing else None
                return self._accept()
        except STORE_ERRORS as error:
            return self._decide_without_store(error)

    def poll(self) -> str | None:
        """Return why it is pointless to wait on, or None. Quick; at most one request to the store."""
        if time.monotonic() >= self._polls_at:
            self._polls_at = time.monotonic() + shared_poll(0.0, len(self.ranks))
            with suppress(*STORE_ERRORS), self.store.within(_GLANCE_SEC):  # the collective itself may still succeed
                if self._failure.find_alarm() is not None:
                    return "another rank has given up"
        return self.find_dead()

    def find_dead(self) -> str | None:
        """Return the death of a rank of this host in words, or None. Asks no store."""
        dead = self.members.dead()
        return f"the process of {self.name(dead)} is gone" if dead else None

    # -- deciding -----------------------------------------------------------------------------------------------------

    def decide(
        self, seq: int, reason: str, *, is_broken: bool, started: float, deadline: float, is_late: bool = False
    ) -> Verdict:
        """Return the verdict on the failed collective ``seq``: at ``deadline`` (time.monotonic), if not before.

        ``reason``: what this rank saw. ``is_broken``: that was a connection that a peer closed. ``is_late``: this rank
        ended ``seq``, and had no time left to begin the next one. A store that is slow has `_WRITE_SEC` more: the
        verdict that all ranks wait for is written when the deadline has come.
        """
        try:
            with self.store.within(max(_GLANCE_SEC, deadline - time.monotonic()) + 2 * _YIELD_SEC + _WRITE_SEC):
                is_broken = self._failure.raise_alarm(_BROKEN if is_broken else _LATE) == _BROKEN.encode()
                note = self.own_note.get(self.rank, "")
                self._failure.report(Answer(seq, tuple(self.members.alive()), note).pack())
                return self._decide(seq + is_late, reason, is_broken, started, deadline)
        except STORE_ERRORS as error:
            return self._decide_without_store(error)

    def _decide(self, seq: int, reason: str, is_broken: bool, started: float, deadline: float) -> Verdict:
        answered = time.monotonic() + _BROKEN_SEC + 4 * shared_poll(0.0, len(self.ranks))
        due = min(deadline, answered) if is_broken else deadline
        for reports in self._failure.turns(due, repeat(shared_poll(_POLL_SEC, len(self.ranks)))):
            if self.members.dead():  # certain, so there is no need to wait for ranks that are merely slow
                time.sleep(_POLL_SEC)  # ranks of one host tend to die together
                dead = self.members.dead()
                return self._write(dead, dead, started, reason)
            if reports is not None:
                answers = {rank: Answer.unpack(report) for rank, report in reports.items()}
                begun = min(seq, max((answer.seq for answer in answers.values()), default=seq))  # by some rank
                missing = find_missing(self.ranks, begun, answers, is_over=time.monotonic() >= deadline)
                if missing is None:
                    return self._decide(seq, reason, False, started, deadline)
                notes = {rank: answer.note for rank, answer in answers.items() if answer.note}
                return self._write(missing, (), started, reason, notes)
        return self._accept()

    def leave(self, why: str) -> Verdict:
        """Make the verdict that this rank left in the middle of a call."""
        text = f"{self._what} was not completed:\n  {self.name([self.rank])}: left in the middle of it ({why})"
        return self.publish(Verdict((self.rank,), f"{text}\n{self._closing}".rstrip()))

    def note(self, text: str) -> None:
        """Write what the errors of ranks that miss this one are to say; an empty text takes it back. Local."""
        self.own_note = {self.rank: text} if text else {}
        with suppress(*STORE_ERRORS), self.store.within(_GLANCE_SEC):
            self.store.set(f"note/{self.rank}", text)

    def _read_notes(self, ranks: Iterable[int]) -> dict[int, str]:
        keys = {f"note/{rank}": rank for rank in ranks}
        notes = self.store.read_present(list(keys))
        return {keys[key]: note.decode(errors="replace") for key, note in notes.items() if note}

    def explain(self, reason: str) -> Verdict | None:
        """Make the verdict on other ranks that left a note; None where none did.

        ``reason``: what this rank saw, which shows that they take no further part.
        """
        notes: dict[int, str] = {}
        with suppress(*STORE_ERRORS), self.store.within(_GLANCE_SEC):
            notes = self._read_notes(rank for rank in self.ranks if rank != self.rank)
        if not notes:
            return None
        lines = [*notes.values(), f"{self.name([self.rank])} waited and saw: {reason}", self._closing]
        return self.publish(Verdict(tuple(notes), "\n".join(lines).rstrip()))

    def publish(self, verdict: Verdict) -> Verdict:
        """Make this the verdict of all ranks unless there is one; return theirs."""
        try:
            with self.store.within(_LEAVE_SEC):
                return self._post(verdict)
        except STORE_ERRORS as error:
            return self._decide_without_store(error)

    def _write(
        self, missing: Iterable[int], dead: Collection[int], started: float, reason: str, notes: Mapping[int, str] = {}
    ) -> Verdict:
        missing = tuple(sorted(missing))
        return self._post(Verdict(missing, self._text(missing, dead, time.monotonic() - started, reason, notes)))

    def _post(self, verdict: Verdict) -> Verdict:
        self._failure.write(verdict.pack())
        self._failure.raise_alarm(_LATE)
        return self._accept()

    def read(self) -> Verdict | None:
        """Return the verdict if a rank has written one; never waits for it."""
        return None if self._failure.find_verdict() is None else self._accept()

    def _accept(self) -> Verdict:
        assert self._failure.verdict is not None
        verdict = Verdict.unpack(self._failure.verdict)
        with suppress(*STORE_ERRORS):
            if self._failure.count_as_reader() and self.rank == self.store.host_rank:  # the store may end with it
                readers = len(set(self.ranks).difference(verdict.missing) | {self.rank})
                look_sec = shared_poll(_POLL_SEC, len(self.ranks))
                self._failure.linger(readers, _LINGER_SEC + 2 * look_sec, look_sec)
        return verdict

    def _decide_without_store(self, error: BaseException) -> Verdict:
        if isinstance(error, ConfigError):  # it never was a store for a rendezvous
            raise error
        loss = self.members.diagnose_without_store(error, name=self.name)
        verdict = Verdict(loss.missing, loss.message([f"{self._what} was not completed:"], self._closing))
        if isinstance(error, StoreSilent):
            self._failure.write_later(verdict.pack(), _LATE)
        return verdict

    # -- words --------------------------------------------------------------------------------------------------------

    def name(self, ranks: Iterable[int]) -> str:
        """Return these ranks in words, with their group ranks where those differ."""
        return ranks_text([self._names.get(rank, rank) for rank in ranks])

    def _text(
        self,
        missing: Collection[int],
        dead: Collection[int],
        waited_sec: float,
        reason: str,
        notes: Mapping[int, str],
    ) -> str:
        silent = [rank for rank in missing if rank not in dead]
        lines = [f"{self._what} was not completed after {waited_sec:.1f} s:"]
        lines += [f"  {self.name(ranks)}: {what}" for ranks, what in ((dead, IS_GONE), (silent, IS_ABSENT)) if ranks]
        lines += {**self._read_notes(missing), **notes, **self.own_note}.values()
        if not missing:
            lines.append("  no rank is known to be missing; the connection between ranks failed")
        lines.append(f"{self.name([self.rank])} waited and saw: {reason}")
        look_at = "the output of the missing ranks" if missing else "the output of all ranks and at the network"
        lines.append(f"Look at {look_at} first. {SLOW} {self._timeout_name}. {self._closing}".rstrip())
        return "\n".join(lines)
