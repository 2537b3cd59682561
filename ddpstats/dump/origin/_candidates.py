"""What is kept of a rank's entries in the search for the first NaN: where it may have begun, and the collectives.

Which of them is to blame is decided elsewhere: on one rank by `_rank_scan`, over all ranks by `_first_nan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ddpstats.dump.format._entries import Entry, Leaf
from ddpstats.dump.format._files import RankDump
from ddpstats.dump.origin._growth import Growth

Kind = Literal["computation", "arrived", "parameter", "uninitialised", "gradient", "collective"]


class Bad(NamedTuple):
    """A tensor of an entry that is not finite."""

    path: str
    leaf: Leaf

    @property
    def mark(self) -> str:
        """Tells it apart from others, as well as statistics can."""
        raw = self.leaf.raw
        return repr([raw.get(key) for key in ("shape", "Max", "Min", "Mean", "Norm", "nan_count", "first_bad")])


@dataclass(eq=False)
class Candidate:
    """Where something that was finite may have become NaN or infinite.

    Attributes:
        kind: "computation", "collective": this entry made it; "arrived": a tensor that was not finite when this entry
            took it in; "parameter": likewise, a parameter; "uninitialised": memory that nobody wrote to; "gradient": a
            parameter's gradient, of which nothing else is known.
        entry: which.
        bad: the tensors in question.
        position: how many collectives of this rank came before.
        order: how many entries came before.
        stands: None while that is open.
        used: infinities of it went into something that was finite again.
        masked: some of its inputs hold infinities that were put there on purpose.
        before: names of the entries just before.
        parameters: names in the model of those that were not finite, of kind "parameter".
        in_backward: the backward pass had begun: a call in it, as of a Function written in Python, is a forward one.
    """

    kind: Kind
    entry: Entry
    bad: tuple[Bad, ...]
    position: int
    order: int
    stands: bool | None = None
    used: bool = False
    masked: bool = False
    before: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    in_backward: bool = False

    @property
    def name(self) -> str:
        return self.entry.name

    def holds(self) -> bool:
        if self.stands is None:
            return self.kind != "uninitialised" and not self.used
        return self.stands


@dataclass(frozen=True)
class Collective:
    """A collective of one rank: with whom, and what of it was not finite. Ranks are global ones."""

    entry: Entry
    api: str
    number: int
    ranks: tuple[int, ...]  # of the group; empty where the dump does not say
    group: str
    root: int | None
    peer: int | None
    bad_inputs: tuple[Bad, ...]
    bad_outputs: tuple[Bad, ...]

    @property
    def name(self) -> str:
        return self.entry.name


@dataclass
class RankScan:
    """What one rank's dump says."""

    dump: RankDump
    entries: int = 0
    tensors: int = 0
    candidates: list[Candidate] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    growth: Growth = field(default_factory=Growth)

    @property
    def rank(self) -> int:
        return self.dump.rank or 0


def is_bad(leaf: Leaf) -> bool:
    """NaN or infinite, by the counts, or else by Max and Min: a norm may overflow where no element does."""
    if leaf.nan_count is not None and leaf.inf_count is not None:
        return leaf.nan_count > 0 or leaf.inf_count > 0
    return any(value is not None and not math.isfinite(value) for value in (leaf.max, leaf.min))


def has_nan(leaf: Leaf) -> bool:
    if leaf.nan_count is not None:
        return leaf.nan_count > 0
    return any(value is not None and math.isnan(value) for value in (leaf.max, leaf.min))
