"""What made a step go wrong: told by where it goes wrong again, from the same state. Pure.

1. The rank itself runs it again. Not wrong each time: a transient fault of its hardware, or a race.
2. Wrong each time: the next rank that can (`from_rank_on`) runs it from what the first one hands over. Right there: the
   hardware of the first rank, or what only that rank holds outside of what was handed over.
3. Wrong there, too: software or data. In other precisions the rank itself finds out whether digits were lacking.

Ranks that wait for an answer are told what failed (`attempt`). What is wrong only the caller knows: capture a gradient
that is not finite, sentinel a value that is not normal on that rank. A vote among replicas is another idea and stands
in the sentinel: there nobody knows what is right, and the majority is taken for it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Cause(enum.Enum):
    """By what is wrong again."""

    TRANSIENT = "not each time on the same rank"
    UNTOLD = "on the same rank, and no other one could run it"
    HARDWARE = "on the same rank, and not on another one"
    SOFTWARE_OR_DATA = "on another rank, too"


def cause_of(wrong_here: Iterable[object], wrong_there: object) -> Cause:
    """``wrong_here``: of each run on the rank itself; ``wrong_there``: on a peer, None where none could run it."""
    if not all(wrong_here):
        return Cause.TRANSIENT
    if wrong_there is None:
        return Cause.UNTOLD
    return Cause.SOFTWARE_OR_DATA if wrong_there else Cause.HARDWARE


def from_rank_on(ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """``rank``, the next one, and so on around: the order in which ranks are asked to run a step of ``rank``'s."""
    place = ranks.index(rank)
    return (*ranks[place:], *ranks[:place])


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``run`` returns, or {"error": words}: other ranks wait for an answer."""
    try:
        return run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
