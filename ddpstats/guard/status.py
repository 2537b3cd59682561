"""A rank's status and the verdict that all statuses lead to, and both as bytes for the store. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpstats._base.files import parse_json
from ddpstats.guard.event import MESSAGES, Event, newest_in_a_row, text_or_none

MISMATCH, MISSING, DOUBT, NOTHING = "mismatch", "missing", "doubt", "nothing"
LEFT = "left the guard"
_MAX_BYTES = 4 << 20


def message_place(event: Event) -> int:
    """Return what stands for a message in `RankStatus.waits_in`: when it began, in microseconds."""
    return int(event.started * 1e6)


@dataclass(frozen=True)
class RankStatus:
    """One rank's status, as far as it is known.

    ``events``: of the group in question, oldest first, without gaps. ``messages``: its newest, by their numbers.
    ``count``: how many collectives of the group the rank began. ``waits_in``: what it waits in now: (group, seq) or
    None. ``left``: how it left the guard, if it did. ``dead``: its process is gone. ``stack``: of its main thread.
    ``slept_sec``: how long its process ran no Python lately, where that was for most of the timeout.
    """

    rank: int
    events: Sequence[Event] = ()
    count: int = 0
    waits_in: tuple[str, int] | None = None
    last: str | None = None
    left: str | None = None
    dead: bool = False
    stack: str | None = None
    slept_sec: float = 0.0
    messages: Sequence[Event] = ()

    @property
    def is_silent(self) -> bool:
        """True where the rank itself has reported nothing of this group: its ``count`` is 0 for that reason alone."""
        return not self.events and not self.count and self.stack is None and self.left is None

    @property
    def is_follower(self) -> bool:
        """True where the rank left because it missed another one: it is not at fault itself."""
        return self.left is not None and self.left.startswith(f"{LEFT} by RankMissing")

    def waits_for(self, group: str, before: int | None = None) -> bool:
        """Return whether the rank waits in that group, in a number ``before`` that one if it is given."""
        if self.dead or self.waits_in is None or self.waits_in[0] != group:
            return False
        return before is None or self.waits_in[1] < before

    def at(self, seq: int) -> Event | None:
        """The rank's event of that number; None if it has none, or not any more."""
        if not self.events:
            return None
        index = seq - self.events[0].seq
        return self.events[index] if 0 <= index < len(self.events) else None

    def message_waited_for(self) -> Event | None:
        """Return the message that the rank waits for now."""
        place = None if self.waits_in is None else self.waits_in[1]
        waits = self.waits_in is not None and self.waits_in[0].endswith(MESSAGES)
        return next((event for event in self.messages if waits and message_place(event) == place), None)

    def pack(self) -> str:
        events, messages = ([event.as_dict() for event in given] for given in (self.events, self.messages))
        return json.dumps({**vars(self), "events": events, "messages": messages})

    @classmethod
    def unpack(cls, payload: bytes) -> RankStatus:
        """Raises ValueError for what `pack` did not write."""
        try:
            if len(payload) > _MAX_BYTES:
                raise ValueError("too long")
            given = parse_json(payload)
            waits_in = given["waits_in"]
            return cls(
                int(given["rank"]),
                newest_in_a_row(map(Event.from_dict, given["events"])),
                int(given["count"]),
                None if waits_in is None else (str(waits_in[0]), int(waits_in[1])),
                text_or_none(given["last"]),
                text_or_none(given["left"]),
                False,
                text_or_none(given["stack"]),
                float(given["slept_sec"]),
                tuple(map(Event.from_dict, given["messages"])),
            )
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a status: {error!r}") from None


@dataclass(frozen=True)
class GuardFinding:
    """A verdict. ``kind`` is `MISMATCH` or `MISSING`; `NOTHING`: the alarm was a false one, and all ranks go on;
    `DOUBT`: they go on, with a warning. ``doubts``: numbers of collectives whose labels differ and may do so.
    ``printer``: the rank that prints the error whole; None where each rank has concluded alone, and prints it itself.
    """

    kind: str
    message: str
    group: str
    seq: int
    missing: tuple[int, ...] = ()
    culprits: tuple[int, ...] = ()
    by_rank: Mapping[int, Event] = field(default_factory=dict)
    doubts: tuple[int, ...] = ()
    printer: int | None = None

    def pack(self) -> str:
        return json.dumps({**vars(self), "by_rank": {rank: event.as_dict() for rank, event in self.by_rank.items()}})

    @classmethod
    def unpack(cls, payload: bytes) -> GuardFinding:
        """Raises ValueError for what `pack` did not write."""
        try:
            given = parse_json(payload)
            return cls(
                str(given["kind"]),
                str(given["message"]),
                str(given["group"]),
                int(given["seq"]),
                tuple(map(int, given["missing"])),
                tuple(map(int, given["culprits"])),
                {int(rank): Event.from_dict(event) for rank, event in given["by_rank"].items()},
                tuple(map(int, given["doubts"])),
                int(given["printer"]),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a verdict: {error!r}") from None
