"""The backward passes of one micro-batch: under way, and what they brought: whose gradients, how large, and reduced?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe.gradient_norms import NO_GRADIENT
from ddpstats._observe.own_reductions import Counts, issued, ranks_of, since
from ddpstats._observe.torch_groups import bucket_count, has_comm_hook


@dataclass
class BackwardPass:
    """One backward pass: whose gradients it brought, how large; whether they are reduced afterwards.

    Attributes:
        early: places of parameters whose gradient was reduced by hooks of the program's, and measured before these.
        arrived: whether a gradient has.
        quiet: places of those that are known to have arrived before any collective since the forward pass began.
        issued: collectives since then, when the pass had ended; None while it goes on.
        end: the counts at that time.
        first: the number of the micro-batch's first pass since then.
    """

    first: int
    measured: list[tuple[list[Tensor], Tensor]] = field(default_factory=list)
    exchanged: bool = False
    arrived: bool = False
    early: set[int] = field(default_factory=set)
    quiet: set[int] = field(default_factory=set)
    issued: Counts | None = None
    end: Counts = field(default_factory=dict)


@dataclass(frozen=True)
class EarlyGradient:
    """A gradient before the program's hooks on it: its norm, itself where it may be needed, collectives until then."""

    norms: Tensor
    gradient: Tensor | None
    counts: Counts


@dataclass
class WatchedMicroBatch:
    """A micro-batch under way.

    Attributes:
        tasks: autograd's graph tasks whose end has been asked for; the first one of a pass is the outermost.
        waiting: parameters whose gradient has arrived and is not yet measured.
        local: place of a parameter -> its own gradient, kept because one was bad.
        early: place of a parameter -> what its gradient was before the program's hooks, which are running.
        start: collectives until the last forward pass began, and of the program's hooks on parameters.
        first: how many backward passes there were by then.
    """

    at_once: bool = False
    start: Counts = field(default_factory=dict)
    first: int = 0
    passes: list[BackwardPass] = field(default_factory=list)
    tasks: set[int] = field(default_factory=set)
    waiting: list[Tensor] = field(default_factory=list)
    local: dict[int, Tensor] = field(default_factory=dict)
    early: dict[int, EarlyGradient] = field(default_factory=dict)
    _quiet: bool = True

    def count_from_here(self) -> None:
        """A forward pass begins."""
        self.start, self.first, self._quiet = issued(), len(self.passes), True

    def is_quiet(self) -> bool:
        """Whether no collective was issued since the forward pass began."""
        self._quiet = self._quiet and not since(self.start)
        return self._quiet

    def close_pass(self) -> None:
        """The last one has ended. Idempotent."""
        if self.passes and self.passes[-1].issued is None:
            self.passes[-1].issued, self.passes[-1].end = since(self.start), issued()


class BackwardNorms:
    """What one micro-batch's backward passes brought: whose gradients, how large. Read when there is a reason to."""

    def __init__(
        self,
        passes: list[BackwardPass],
        place: dict[int, int],
        local: dict[int, Tensor],
        replicas: Sequence[nn.parallel.DistributedDataParallel],
    ) -> None:
        self._passes, self._place, self._local, self._replicas = passes, place, local, replicas

    @property
    def exchanged(self) -> list[bool]:
        """Of each pass: whether its gradients were reduced afterwards, or meanwhile."""
        return [one.exchanged or bool(self._foreign(number)) for number, one in enumerate(self._passes)]

    def note_reduction(self) -> None:
        """The next micro-batch begins: what the program has communicated since the last pass may be its gradients."""
        if self._passes and since(self._passes[-1].end):
            self._passes[-1].exchanged = True

    def shared_with(self) -> list[tuple[int, ...]]:
        """Of each pass: the ranks with which the program communicated before its first bad gradient was seen.

        Empty where that gradient is this rank's own for sure.
        """
        bad = self.bad_places()
        return [
            () if one.quiet & set(bad[number]) else ranks_of(self._foreign(number))
            for number, one in enumerate(self._passes)
        ]

    def early_places(self) -> set[int]:
        """Parameters whose gradient was reduced by hooks of the program's on it, and measured before these."""
        return {place for one in self._passes for place in one.early}

    def _foreign(self, number: int) -> list[Any]:
        """Groups on which more was issued, until the end of that pass, than DDP does in those until then."""
        one = self._passes[number]
        reductions = sum(other.exchanged for other in self._passes[one.first : number + 1])
        return [
            group
            for group, count in (one.issued or {}).items()
            if count is None or count > sum(_most_collectives(ddp, group, reductions) for ddp in self._replicas)
        ]

    def places(self) -> set[int]:
        """Parameters that got a gradient."""
        return {self._place[id(parameter)] for parameters, _ in self._measured() for parameter in parameters}

    def local(self) -> dict[int, Tensor] | None:
        """Place of a parameter -> this rank's own gradient; None where not all of them could be kept."""
        return self._local if self._local and self.places() == self._local.keys() else None

    def away(self) -> list[Tensor]:
        """The norms that lie on an accelerator."""
        return [norms for _, norms in self._measured() if not norms.is_cpu]

    def norms(self) -> Tensor | None:
        """One per parameter of the module, float64, on the host; `NO_GRADIENT` where none came; None without any."""
        if not self._measured():
            return None
        found = torch.full((len(self._place),), NO_GRADIENT, dtype=torch.float64, device="cpu")
        for parameters, norms in self._measured():
            places = torch.tensor([self._place[id(parameter)] for parameter in parameters], device="cpu")
            found[places] = norms.to("cpu", torch.float64)
        return found

    def bad_places(self) -> list[list[int]]:
        """Of each pass: parameters whose gradient was not finite, as they came: the loss's end first."""
        return [_bad_places(one, self._place) for one in self._passes]

    def _measured(self) -> list[tuple[list[Tensor], Tensor]]:
        return [measured for one in self._passes for measured in one.measured]


def _most_collectives(replica: nn.parallel.DistributedDataParallel, group: Any, reductions: int) -> float:
    """How many collectives so many of its reductions issue on that group. Asked when something is wrong only."""
    if replica.process_group is not group or not reductions:
        return 0
    if has_comm_hook(replica):
        return math.inf  # a hook may issue any number
    return reductions * (bucket_count(replica) + int(replica.find_unused_parameters))


def _bad_places(one: BackwardPass, place: dict[int, int]) -> list[int]:
    order: dict[int, None] = {}
    for parameters, norms in one.measured:
        finite = norms.isfinite().tolist()
        order.update({place[id(p)]: None for p, ok in zip(parameters, finite, strict=True) if not ok})
    return list(order)
