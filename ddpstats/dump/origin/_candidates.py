"""What is kept of a rank's entries in the search for the first NaN: where it may have begun.

Which of them is to blame is decided elsewhere: on one rank by `_rank_scan`, over all ranks by `_first_nan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ddpstats.dump.format._collective_calls import CollectiveEntry
from ddpstats.dump.format._entries import DumpEntry, DumpLeaf
from ddpstats.dump.format._files import RankDump, rank_of
from ddpstats.dump.origin._growth import Growth

Kind = Literal["computation", "arrived", "parameter", "uninitialised", "given", "gradient", "collective"]
Standing = Literal["strong", "weak", "unused", "finite again"]


class NonFiniteTensor(NamedTuple):
    """A tensor of an entry that is not finite."""

    path: str
    leaf: DumpLeaf


@dataclass
class Late:
    """Ends made after the newest entry of a backward pass, or where there is none.

    Attributes:
        after: how many entries of backward passes came before.
        grad: how many require a gradient.
        kept: how many were written in place, as an optimizer does: the program has them still.
    """

    after: int = 0
    grad: int = 0
    kept: int = 0


@dataclass(eq=False)
class Candidate:
    """Where something that was finite may have become NaN or infinite.

    Attributes:
        kind: "computation", "collective": this entry made it; "arrived": a tensor that was not finite when this entry
            took it in; "parameter": likewise, a parameter; "uninitialised": memory that nobody wrote to; "given": the
            program gave this entry a NaN, to write it; "gradient": a parameter's gradient, of which nothing else is
            known.
        entry: which.
        bad: the tensors in question.
        position: how many collectives of this rank came before.
        order: how many entries came before.
        reached: a gradient or a collective used it.
        ends: tensors that hold it, and that nothing took so far; ``ends_grad``: those of them that require a gradient;
            ``ends_graph``: those made by something whose backward pass came.
        late: of those, the ones of which no backward pass may have come yet.
        standing: "strong": reached, or the loss ends in it; "weak": it is in the dump of a forward pass, and nothing
            used it; "unused": likewise, and the gradients that came do not hold it; "finite again": all that was seen
            of it. Set when the rank has been read.
        masked: some of its inputs hold infinities that were put there on purpose.
        before: names of the entries just before.
        parameters: names in the model of those that were not finite, of kind "parameter".
        in_backward: the backward pass had begun: a call in it, as of a Function written in Python, is a forward one.
    """

    kind: Kind
    entry: DumpEntry
    bad: tuple[NonFiniteTensor, ...]
    position: int
    order: int
    reached: bool = False
    ends: int = 0
    ends_grad: int = 0
    ends_graph: int = 0
    late: Late = field(default_factory=Late)
    standing: Standing = "finite again"
    masked: bool = False
    before: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    in_backward: bool = False

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def holds(self) -> bool:
        return self.standing in ("strong", "weak")

    def settle(self, gradients: int) -> None:
        """Everything of this rank has been seen, ``gradients`` entries of backward passes among it."""
        late = self.late if self.late.after == gradients else Late()
        if self.reached or self.ends_graph or late.grad:
            self.standing = "strong"
        elif self.ends:
            self.standing = "unused" if gradients and not late.kept else "weak"


@dataclass
class RankScan:
    """What one rank's dump says.

    Attributes:
        recorded: which parts its entries have tensors in: ("forward", "input"), ("backward", "output"), ...
    """

    dump: RankDump
    entries: int = 0
    candidates: list[Candidate] = field(default_factory=list)
    collectives: list[CollectiveEntry] = field(default_factory=list)
    growth: Growth = field(default_factory=Growth)
    recorded: set[tuple[str, str]] = field(default_factory=set)

    @property
    def rank(self) -> int:
        return rank_of(self.dump)


def is_bad(leaf: DumpLeaf) -> bool:
    """NaN or infinite, by the counts, or else by Max and Min: a norm may overflow where no element does."""
    if leaf.nan_count is not None and leaf.inf_count is not None:
        return leaf.nan_count > 0 or leaf.inf_count > 0
    return any(value is not None and not math.isfinite(value) for value in (leaf.max, leaf.min))


def bad_ones(leaves: Iterable[tuple[str, DumpLeaf]]) -> list[NonFiniteTensor]:
    return [NonFiniteTensor(path, leaf) for path, leaf in leaves if is_bad(leaf)]


def has_nan(leaf: DumpLeaf) -> bool:
    if leaf.nan_count is not None:
        return leaf.nan_count > 0
    return any(value is not None and math.isnan(value) for value in (leaf.max, leaf.min))
