"""One event, one verdict: what ranks tell each other through the store when no collective can be trusted.

1. `meet`: at the first use of a group every rank says that it is there, before any collective is tried.
2. `poll_verdict`: a rank that has waited for a while in a collective posts that it waits, and looks for a verdict and
   for ranks that died: on one host, a process that no longer exists is known at once.
3. `decide_verdict`: a rank whose collective failed watches who else waits. Who does not is missing. The first rank to
   reach a conclusion writes the verdict; all others, and a late one at its next call, raise that text. One rank, the
   first to come, reads the notes of all; the others look for its verdict, and take its place where none comes.

One thread of one process answers the requests of all ranks. So a rank that waits asks for a few keys, not for one of
each rank, and the more ranks there are, the less often (`store.shared_poll`).

The store is a helper here, never a dependency. Where it is gone or silent, each rank says what it knows alone
(`roster`), in words that others who know the same would choose as well. `board` keeps what the first rank of a host
concluded for its other ranks. Where nobody can be named, `GroupVerdict.missing` is empty.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpstats._base.files import parse_json
from ddpstats._ranks.board import Board
from ddpstats._ranks.roster import Lost, ProcessId, Roster
from ddpstats._ranks.store import STORE_ERRORS, bounded, growing_polls, shared_poll
from ddpstats.errors import ConfigError

_POLL_SEC = 0.05
_LOOK_SEC = 0.5  # between two looks for ranks that died before they came
_GLANCE_SEC = 1.0
_LEAVE_SEC = 5.0
_YIELD_SEC = 0.5  # after the time is over: for the verdict of the rank that reads the notes of all
_WRITE_SEC = 2.0  # for a store that is slow
_MAX_VERDICT_BYTES = 1 << 20

Describe = Callable[[tuple[int, ...], tuple[int, ...]], str]
"""Makes the text of a verdict from (missing ranks, those of them known to be dead)."""


@dataclass(frozen=True)
class GroupVerdict:
    """What all ranks raise. ``missing``: global ranks; empty where nobody can be named."""

    missing: tuple[int, ...]
    message: str


class Mailbox:
    """This rank's access to the group's store, a `BoundedStore` or one that needs no limit.

    ``peers`` and ``all_started``: as of a `Roster`. ``describe_lost`` makes the text of a verdict without the store;
    it may say nothing that other ranks would say otherwise.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Iterable[int],
        peers: Mapping[int, ProcessId] | None = None,
        describe_lost: Callable[[Lost], str] | None = None,
        all_started: bool = False,
    ) -> None:
        self.store = bounded(store)
        self.roster = Roster(self.store, rank, ranks, peers, all_started)
        self.rank, self.ranks = self.roster.rank, self.roster.ranks
        self._describe_lost = describe_lost
        self._board: Board | None = None
        self._looked, self._absent = time.monotonic(), set[int]()
        self._waiting_in: int | None = None  # what this rank posted
        self._told_dead = set[int]()
        self._polls_at = 0.0

    def meet(self, timeout_sec: float, slice_sec: float, describe: Describe) -> GroupVerdict | None:
        """Say that this rank is there and wait for all others; a verdict if some did not come in time, or cannot."""
        deadline = time.monotonic() + timeout_sec
        try:
            with self.store.within(timeout_sec + slice_sec + 2 * _YIELD_SEC):
                self.roster.join()
                for poll_sec in growing_polls(shared_poll(min(slice_sec, _LOOK_SEC), len(self.ranks))):
                    if self.roster.are_all_here():
                        break
                    time.sleep(min(poll_sec, max(_POLL_SEC, deadline - time.monotonic())))
                    written = self.read() or self._without_the_dead(describe)
                    if written is not None:
                        return written
                    if self._is_over(deadline, "meeting"):
                        missing = self.roster.absent()
                        if missing:
                            return self._write(missing, [], describe)
                        break  # who came last could not say so
                self.roster.learn()
                token = self.store.post("board", secrets.token_hex(16)).decode(errors="replace")
                self._board = Board(token, self.roster.others_here()) if token.isalnum() else None
                return self.read()
        except STORE_ERRORS as error:
            return self._without_store(error, describe)

    def poll_verdict(self, seq: int, limit_sec: float = _GLANCE_SEC) -> GroupVerdict | None:
        """Post that this rank waits in its ``seq``-th collective; the verdict, if one is due or written."""
        if time.monotonic() < self._polls_at:
            return None
        self._polls_at = time.monotonic() + shared_poll(0.0, len(self.ranks))
        try:
            with self.store.within(limit_sec):
                self._post_waiting(seq)
                return self.read()
        except STORE_ERRORS:  # the collective itself may still succeed; if not, `decide_verdict` reports the store
            return self._posted()

    def dead_peers(self) -> set[int]:
        """Peers of this host whose process is gone; told to the other hosts through the store."""
        dead = self.roster.dead()
        try:
            if not dead <= self._told_dead:
                with self.store.within(_GLANCE_SEC):
                    self._tell_dead(dead)
        except STORE_ERRORS:
            pass
        return dead

    def decide_verdict(self, seq: int, deadline: float, describe: Describe) -> GroupVerdict:
        """The verdict on the failed ``seq``-th collective: at ``deadline`` (time.monotonic), if not before.

        A store that is slow has `_WRITE_SEC` more: what all wait for is written when the deadline has come.
        """
        try:
            with self.store.within(max(_GLANCE_SEC, deadline - time.monotonic()) + 2 * _YIELD_SEC + _WRITE_SEC):
                return self._decide_verdict(seq, deadline, describe)
        except STORE_ERRORS as error:
            return self._without_store(error, describe)

    def _decide_verdict(self, seq: int, deadline: float, describe: Describe) -> GroupVerdict:
        self._post_waiting(seq)
        judges = self._judges(f"waiting {seq}")
        while True:
            written = self.read() or self._posted_for_all()
            if written is not None:
                return written
            dead = self._dead()
            if dead:  # certain, so no need to wait for ranks that are merely slow
                time.sleep(_POLL_SEC)  # ranks of one host tend to die together
                dead = self._dead()
                return self._write(dead, dead, describe)
            is_over = time.monotonic() >= deadline + (0.0 if judges else _YIELD_SEC)
            if is_over or (judges and self.store.counted("waiting") >= len(self.ranks)):
                missing = self._not_waiting(seq)
                if not missing or is_over:
                    return self._write(missing, [], describe)
            time.sleep(shared_poll(_POLL_SEC, len(self.ranks)))

    def _judges(self, what: str) -> bool:
        """Whether this rank is the first to come there, and reads the notes of all."""
        mine = str(self.rank)
        return self.store.post(f"judge/{what}", mine) == mine.encode()

    def _is_over(self, deadline: float, what: str) -> bool:
        """Whether this rank is to conclude: who is first after the deadline does, and any other a moment later."""
        now = time.monotonic()
        return now >= deadline and (now >= deadline + _YIELD_SEC or self._judges(what))

    def leave(self, describe: Describe) -> GroupVerdict:
        """Say that this rank is the one that others will miss."""
        try:
            with self.store.within(_LEAVE_SEC):
                return self._write([self.rank], [], describe)
        except STORE_ERRORS as error:
            return self._without_store(error, describe)

    def announce(self, message: str) -> GroupVerdict:
        """Say that this rank takes no further part. The words of the first rank that did so become the verdict."""
        mine = _spell(GroupVerdict((self.rank,), message))
        try:
            with self.store.within(_LEAVE_SEC):
                first = _parse(self.store.post("announced", mine))
                self._write(list(first.missing), [], lambda missing, dead: first.message)
        except STORE_ERRORS:
            return GroupVerdict((self.rank,), message)
        return first

    def announced(self) -> GroupVerdict | None:
        """What the first rank said that took no further part; never waits for it, and no error without the store."""
        try:
            with self.store.within(_GLANCE_SEC):
                announced = self.store.find("announced")
                return None if announced is None else _parse(announced)
        except STORE_ERRORS:
            return None

    def read(self) -> GroupVerdict | None:
        """The verdict, if some rank has written one; never waits for it."""
        written = self.store.find("verdict")
        return None if written is None else self._keep(_parse(written))

    def _write(self, missing: list[int], dead: list[int], describe: Describe) -> GroupVerdict:
        mine = GroupVerdict(tuple(missing), describe(tuple(missing), tuple(dead)))
        return self._keep(_parse(self.store.post("verdict", _spell(mine))))

    def _keep(self, verdict: GroupVerdict) -> GroupVerdict:
        """For ranks of this host that come when the store is gone, with the rank that serves it."""
        if self._board is not None and self.store.host_rank is not None:
            self._board.post(_spell(verdict))
        return verdict

    # -- who is gone --------------------------------------------------------------------------------------------------

    def gone(self) -> set[int]:
        """Ranks of this host whose process is gone, also before they came; asks no store, and looks now and then."""
        if time.monotonic() - self._looked >= _LOOK_SEC:
            self._looked = time.monotonic()
            absent = self.roster.never_came()
            # Twice in a row: a process is not told from the outside while it begins to run its program.
            self._absent, seen_before = absent, self._absent
            return self.roster.dead() | (absent & seen_before)
        return self.roster.dead()

    def _without_the_dead(self, describe: Describe) -> GroupVerdict | None:
        """While ranks meet: the verdict, if one of them cannot come any more."""
        if time.monotonic() - self._looked < _LOOK_SEC:
            return None
        self.roster.learn()
        dead = sorted(self.gone())
        return self._write(dead, dead, describe) if dead else None

    def _dead(self) -> list[int]:
        here, told = self.dead_peers(), self.store.find("dead")
        dead = here if told is None else here | _numbers(told)
        return [rank for rank in self.ranks if rank in dead]

    def _tell_dead(self, dead: set[int]) -> None:
        """Add to the ranks under one key: whoever decides asks for that alone, not for a note on each rank."""
        while True:
            told = self.store.find("dead") or b""
            if dead <= _numbers(told):
                break
            both = dead | _numbers(told)
            self.store.replace("dead", told.decode(), json.dumps(sorted(both)))
        self._told_dead |= dead

    # -- without the store --------------------------------------------------------------------------------------------

    def _posted_for_all(self) -> GroupVerdict | None:
        """What another rank of this host concluded without the store, as when this one served it and was stopped."""
        posted = self._posted()
        return None if posted is None else _parse(self.store.post("verdict", _spell(posted)))

    def _posted(self) -> GroupVerdict | None:
        """What another rank of this host concluded."""
        try:
            text = None if self._board is None else self._board.read()
            return None if text is None else _parse(text)
        except ValueError:
            return None

    def _without_store(self, error: BaseException, describe: Describe) -> GroupVerdict:
        if isinstance(error, ConfigError):  # it never was one that ranks can meet in
            raise error
        lost = self.roster.known_alone(error)
        text = self._describe_lost(lost) if self._describe_lost else describe(lost.missing, lost.dead)
        said = f"{text}\nThe store, which could tell who is missing, does not answer: {lost.why}"
        mine = GroupVerdict(lost.missing, said)
        return self._posted() or _parse((self._board and self._board.post(_spell(mine))) or _spell(mine))

    def _post_waiting(self, seq: int) -> None:
        if self._waiting_in != seq:
            self.store.set(f"waiting/{self.rank}", str(seq))
            if self._waiting_in is None:
                self.store.add("waiting", 1)
            self._waiting_in = seq

    def _not_waiting(self, seq: int) -> list[int]:
        # A peer may wait in a later collective than the one that failed here; it did take part in this one.
        keys = {f"waiting/{rank}": rank for rank in self.ranks}
        for key in self.store.absent(list(keys)):
            del keys[key]
        told = self.store.multi_get(list(keys)) if keys else []
        waiting = {rank for rank, waits_in in zip(keys.values(), told, strict=True) if int(waits_in) >= seq}
        return [rank for rank in self.ranks if rank not in waiting]


def _numbers(payload: bytes) -> set[int]:
    """The ranks that are told under one key; raises ValueError for anything else."""
    found = json.loads(payload or b"[]")
    if not isinstance(found, list) or not all(type(rank) is int for rank in found):
        raise ValueError("the store names no ranks")
    return set(found)


def _spell(verdict: GroupVerdict) -> str:
    return json.dumps({"missing": verdict.missing, "message": verdict.message})


def _parse(payload: bytes | str) -> GroupVerdict:
    """Read a verdict from the store; raises ValueError for anything else."""
    if len(payload) > _MAX_VERDICT_BYTES:
        raise ValueError("the verdict in the store is too long to be one")
    found = parse_json(payload)
    if not isinstance(found, dict) or not isinstance(found.get("message"), str):
        raise ValueError("the verdict in the store is not one")
    missing = found.get("missing")
    if not isinstance(missing, list) or not all(type(rank) is int for rank in missing):
        raise ValueError("the verdict in the store names no ranks")
    return GroupVerdict(tuple(missing), found["message"])
