"""Marks: what one room of ddpstats found or measured, published to whichever room keeps a record of the run.

The publishing and the recording rooms do not know each other; both know this module. Without a listener a mark is lost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Mark:
    """Something that happened on the ranks, besides their collectives.

    Attributes:
        kind: such as "nonfinite" and "overflow"; "values" for what one rank put into a reduction.
        text: for people; of "values" the name of the reduction.
        time: seconds since 1970.
        step: of the training; None where it is not known.
        ranks: global ranks that it is about, ascending; empty where they are not known.
        values: path -> this rank's value; None where it lacks the path, or holds None.
    """

    kind: str
    text: str = ""
    time: float = 0.0
    step: int | None = None
    ranks: tuple[int, ...] = ()
    values: Mapping[str, float | None] = field(default_factory=dict)


VALUES = "values"  # the kind of mark that holds what a rank put into a reduction


class Listener(Protocol):
    """Is called with marks, and with keys of reductions by their names. Local; must neither wait nor raise."""

    def take_mark(self, mark: Mark) -> None:
        """Something has happened."""

    def renegotiated(self, name: str | None, new_keys: Sequence[str]) -> None:
        """All ranks have a new layout. ``new_keys``: paths that the one before lacked."""

    def reduced(self, site: tuple[str, str, str | None], structure: Any, layout: Any) -> None:
        """One call has ended.

        Args:
            site: the group in words, the kind of the call and its name.
            structure: what this rank held in it.
            layout: what the ranks have agreed on.
        """


# Without one, values of ranks need not be computed.
listeners: list[Listener] = []


def publish(kind: str, text: str = "", **known: Any) -> None:
    """Hand a mark of now to every listener. ``known``: the other fields of `Mark`. Local; nothing waits."""
    for listener in tuple(listeners):
        listener.take_mark(Mark(kind, text, time.time(), **known))
