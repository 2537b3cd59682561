"""What is kept of a rank's entries in the search for the first NaN: where it may have begun.

Which of them is to blame is decided elsewhere: on one rank by `nan_scan`, over all ranks by `_first_nan`.

What is not finite is followed from entry to entry (`Traces`), and leads back to where it began:

1. A tensor of our own dumps is known by its storage, its place in it, and its statistics; others by these alone. Where
   two look alike, it is the newer one: whoever made something last made what is seen next.
2. A trace ends where nothing takes the tensor any more. It goes on where an entry makes another out of it that is not
   finite either; and it is over where an entry makes something finite out of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from ddpstats.dump.analyze._growth import Growth
from ddpstats.dump.entries import DumpEntry, DumpLeaf
from ddpstats.dump.msprobe import CollectiveEntry, Name
from ddpstats.dump.reader import RankDump, rank_of

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


def bad_ones(leaves: Iterable[tuple[str, DumpLeaf]]) -> list[NonFiniteTensor]:
    """Those that are not finite."""
    return [NonFiniteTensor(path, leaf) for path, leaf in leaves if not leaf.is_finite]


# -- traces ------------------------------------------------------------------------------------------------------------

_MAX_TRACES = 65_536
_T = TypeVar("_T")


@dataclass(eq=False)
class Trace:
    """A tensor that is not finite, as an entry had it.

    Attributes:
        cause: where that began; None: infinities that were put there on purpose.
        maker: name of the entry.
        storage: its number; None where the dump does not say.
        counts: its end matters. Not that of memory as it was handed out, nor that of what arrived: nothing used it.
        requires_grad: as the dump has it.
        after: how many entries of backward passes came before.
        is_kept: its maker wrote it in place.
        in_graph: the backward pass of its maker came.
        is_open: nothing took it so far.
        perhaps: of a presumed mask that arrived: what it is if it proves to be none.
    """

    cause: Candidate | None
    maker: str
    storage: int | None
    counts: bool
    requires_grad: bool
    after: int = 0
    is_kept: bool = False
    in_graph: bool = False
    is_open: bool = True
    perhaps: Candidate | None = None

    def close(self) -> None:
        """An entry took it."""
        if self.is_open:
            self.is_open = False
            self._count(-1)

    def joins_graph(self) -> None:
        if self.is_open and not self.in_graph:
            self.in_graph = True
            if self.cause is not None and self.counts:
                self.cause.ends_graph += 1

    def opened(self) -> Trace:
        self._count(1)
        return self

    def _count(self, by: int) -> None:
        if self.cause is not None and self.counts:
            self.cause.ends += by
            self.cause.ends_grad += by * self.requires_grad
            self.cause.ends_graph += by * self.in_graph
            self._count_late(self.cause, by)

    def _count_late(self, cause: Candidate, by: int) -> None:
        if cause.late.after != self.after:
            if by < 0:
                return
            cause.late = Late(self.after)
        cause.late.grad += by * self.requires_grad
        cause.late.kept += by * self.is_kept


class Traces:
    """The traces of one rank; the oldest are forgotten where there are too many."""

    def __init__(self) -> None:
        self._by_look: dict[str, Trace] = {}
        self._by_place: dict[str, Trace] = {}
        self._by_maker: dict[str, list[Trace]] = {}

    def find(self, leaf: DumpLeaf) -> Trace | None:
        look, place = _look(leaf), _place(leaf)
        if place is not None and (found := self._by_place.get(place + look)) is not None:
            return found
        found = self._by_look.get(look)
        if found is not None and None not in (place, found.storage) and not found.is_open:
            return None  # it looks like one that is known to have gone elsewhere, and is another one
        return found

    def add(self, leaf: DumpLeaf, trace: Trace) -> None:
        """From now on, ``leaf`` is ``trace``."""
        look, place = _look(leaf), _place(leaf)
        _put(self._by_look, look, trace)
        if place is not None:
            _put(self._by_place, place + look, trace)
        if trace.counts and trace.cause is not None:
            _put(self._by_maker, trace.maker, [*self._by_maker.get(trace.maker, ()), trace])

    def backward_of(self, forward: str) -> None:
        """The backward pass of an entry came."""
        for trace in self._by_maker.pop(forward, ()):
            trace.joins_graph()


def _put(held: dict[str, _T], key: str, value: _T) -> None:
    held.pop(key, None)
    if len(held) >= _MAX_TRACES:
        del held[next(iter(held))]
    held[key] = value


def _look(leaf: DumpLeaf) -> str:
    """Tells tensors apart as well as statistics can."""
    raw = leaf.raw
    return repr([raw.get(key) for key in ("shape", "Max", "Min", "Mean", "Norm", "nan_count", "first_bad")])


def _place(leaf: DumpLeaf) -> str | None:
    return None if leaf.storage_id is None else f"{leaf.storage_id} {leaf.storage_offset} "


# -- what a call does to values that are not finite, by its name and its arguments -------------------------------------

_UNINITIALISED = re.compile(r"(new_)?empty(_|$)")
_ON_PURPOSE = re.compile(r"(new_)?(full|fill|masked_fill|where|triu|tril)(_|$)")
_OVERWRITES = re.compile(
    r"(copy|zero|fill|normal|uniform|random|bernoulli|exponential|cauchy|log_normal|geometric)_$|"
    r"(zeros|ones|constant|trunc_normal|xavier_\w+|kaiming_\w+|orthogonal|eye|dirac|sparse)_$"
)
_VIEWS = re.compile(
    r"view(_as)?$|reshape(_as)?$|__getitem__$|select$|narrow$|slice|transpose$|permute$|[tTH]$|mT$|squeeze$|unsqueeze$|"
    r"expand(_as)?$|split|chunk$|unbind$|flatten$|detach$|contiguous$|as_strided$|data$|requires_grad_$|__get__$"
)
_WEIGHTED = re.compile(r"(linear|matmul|__matmul__|mm|bmm|mv|einsum|bilinear|conv\w*|embedding(_bag)?)$")
_WEIGHTED_CLASSES = re.compile(r"(\w*Linear|Bilinear|Conv\w+|Embedding(Bag)?)$")


def is_uninitialised(name: Name) -> bool:
    """It gives out memory as it is."""
    return not name.is_module and _UNINITIALISED.match(name.api) is not None


def overwrites(name: Name) -> bool:
    """What its first argument held before is lost."""
    return not name.is_module and name.direction == "forward" and _OVERWRITES.match(name.api) is not None


def is_view(name: Name) -> bool:
    """It only looks at the same values."""
    return not name.is_module and _VIEWS.match(name.api) is not None


def keeps_in_place(name: Name) -> bool:
    """It writes into what it takes, as an optimizer does."""
    return (
        not name.is_module
        and name.direction == "forward"
        and (name.api == "__setitem__" or (name.api.endswith("_") and not name.api.endswith("__")))
    )


def mixes_with_weights(name: Name) -> bool:
    """It multiplies and adds up what it takes, or looks it up: nobody gives it a mask."""
    if name.direction != "forward":
        return False
    if name.is_module:
        return _WEIGHTED_CLASSES.match(name.class_name) is not None
    return _WEIGHTED.match(name.api) is not None


def is_minus_infinity(leaf: DumpLeaf) -> bool:
    return not leaf.has_nan and leaf.max != math.inf


def is_on_purpose(entry: DumpEntry, name: Name, made: list[NonFiniteTensor], masked: bool) -> bool:
    """Infinities that somebody asked for, and what stays minus infinity of them. A NaN never is."""
    if any(bad.leaf.has_nan for bad in made):
        return False
    if _given(entry) or (not name.is_module and _ON_PURPOSE.match(name.api)):
        return True
    return masked and all(is_minus_infinity(bad.leaf) for bad in made)


def is_literal_write(entry: DumpEntry, made: list[NonFiniteTensor]) -> bool:
    """The program gave it a NaN, and that is what came out."""
    return any(bad.leaf.has_nan for bad in made) and any(math.isnan(value) for value in _given(entry))


def _given(entry: DumpEntry) -> list[float]:
    """Its arguments that are numbers, and not finite ones."""
    values = (_number(leaf.value) for _, leaf in entry.values() if not leaf.is_tensor)
    return [value for value in values if not math.isfinite(value)]


def _number(value: Any) -> float:
    try:
        return 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
