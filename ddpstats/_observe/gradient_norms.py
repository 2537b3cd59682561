"""How large gradients are, and the numbers in them: a norm is not finite if and only if some element is not.

On the CPU the norm is the 2-norm, which torch vectorizes, and what it cannot represent is looked at element by element.
On an accelerator it is the largest magnitude, which is exact, in one fused pass; nobody waits for it before `any_bad`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe.groups import Counts, bucket_count, has_comm_hook, issued, ranks_of, since
from ddpstats._observe.torch_compat import norm_each, stored_values

NO_GRADIENT = -1.0


def measure(gradients: Sequence[Tensor | None]) -> Tensor:
    """A norm per gradient, not finite if and only if some element is not; `NO_GRADIENT` for None. float64, on the host.

    The 2-norm on the CPU, the largest magnitude elsewhere: bit for bit what `GradientWatch` measures.
    """
    found = torch.full((len(gradients),), NO_GRADIENT, dtype=torch.float64, device="cpu")
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    if places:
        with torch.no_grad():
            values = [elements(gradient) for gradient in gradients if gradient is not None]
            norms = gathered(norms_of(values))
            found[torch.tensor(places, device="cpu")] = exact(values, norms.cpu()).to(torch.float64)
    return found


def any_bad(gradients: Sequence[Tensor | None], norms: Sequence[Tensor] = ()) -> bool:
    """Whether any element of any gradient, or any of ``norms``, is not finite. Waits once for each device."""
    with torch.no_grad():
        values = [elements(gradient) for gradient in gradients if gradient is not None]
        found = [*([gathered(norms_of(values))] if values else []), *norms]
        if not found:
            return False
        own = found[0]
        if len(found) > 1:
            own = torch.cat([one.to(own.device, torch.float64) for one in found])
        if math.isfinite(own.sum().item()):
            return False
        return not bool(torch.cat([measure(values), *(one.to("cpu", torch.float64) for one in norms)]).isfinite().all())


def norm_kind(device: torch.device) -> str:
    """Which norm is measured there."""
    return "2" if device.type == "cpu" else "inf"


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """Return a norm of each, as 0-d tensors on the gradients' devices; one call per device and dtype."""
    kinds: dict[Any, list[int]] = {}
    for index, gradient in enumerate(gradients):
        kinds.setdefault((gradient.device, gradient.dtype), []).append(index)
    norms: dict[int, Tensor] = {}
    for indices in kinds.values():
        norms.update(zip(indices, _norms_of_a_kind([gradients[index] for index in indices]), strict=True))
    return [norms[index] for index in range(len(gradients))]


def _norms_of_a_kind(gradients: list[Tensor]) -> list[Tensor]:
    if not gradients[0].is_cpu:
        return list(norm_each(gradients, math.inf))
    half = gradients[0].dtype in (torch.float16, torch.bfloat16)
    return list(norm_each(gradients, 2, dtype=torch.float32 if half else None))


def gathered(norms: list[Tensor]) -> Tensor:
    """One vector: on their device if they share it, else on the host; of the widest dtype."""
    try:
        return torch.stack(norms)
    except RuntimeError:  # several devices
        return torch.stack([norm.cpu() for norm in norms])


def exact(gradients: list[Tensor], norms: Tensor) -> Tensor:
    """The 2-norm of finite numbers may overflow: where it is not finite, the elements decide."""
    for place in (~norms.isfinite()).nonzero().flatten().tolist():
        if bool(gradients[place].isfinite().all()):
            norms = norms.to(torch.float64)
            gradient = gradients[place]
            wide = torch.linalg.vector_norm(gradient.to(torch.complex128 if gradient.is_complex() else torch.float64))
            norms[place] = min(wide.item(), torch.finfo(torch.float64).max)
    return norms


def held_values(gradient: Tensor | None) -> Tensor:
    """The numbers this rank holds of it: of a DTensor its shard, of sparse and nested tensors what they store."""
    assert gradient is not None
    if is_sharded(gradient):
        gradient = gradient.to_local()  # type: ignore[attr-defined]
    if gradient.is_sparse:
        return stored_values(gradient)
    return gradient.values() if gradient.is_nested else gradient


def parts_of(name: str, gradient: Tensor) -> dict[str, Tensor]:
    """As ordinary tensors with names: of a sparse gradient, its indices and the values there; else what is held."""
    if not is_sparse(gradient):
        return {name: held_values(gradient)}
    gradient = gradient.coalesce()
    return {f"{name} (indices)": gradient.indices(), f"{name} (values)": gradient.values()}


def elements(gradient: Tensor | None) -> Tensor:
    """What `held_values` gives, but of a sparse gradient each element once: it may hold several parts of one."""
    if type(gradient) is Tensor and gradient.layout is torch.strided and not gradient.is_nested:  # nearly every one
        return gradient
    return gradient.coalesce().values() if gradient is not None and is_sparse(gradient) else held_values(gradient)


def is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.sparse_coo


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


# -- backward passes of one micro-batch ---------------------------------------------------------------------------


@dataclass
class BackwardPass:
    """One backward pass: whose gradients it brought, how large; whether they are reduced afterwards.

    Attributes:
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
    quiet: set[int] = field(default_factory=set)
    issued: Counts | None = None
    end: Counts = field(default_factory=dict)


@dataclass
class WatchedMicroBatch:
    """A micro-batch under way.

    Attributes:
        tasks: autograd's graph tasks whose end has been asked for; the first one of a pass is the outermost.
        waiting: parameters whose gradient has arrived and is not yet measured.
        local: place of a parameter -> its own gradient, kept because one was bad.
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
