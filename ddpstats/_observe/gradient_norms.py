"""Norms of gradients, and what the backward passes of a micro-batch brought.

A norm is not finite if and only if some element is not. On the CPU it is the 2-norm, which torch vectorizes; where that
overflows, the elements decide. On an accelerator it is the largest magnitude, which is exact, in one fused pass; no
thread waits for it before `any_bad`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe.groups import Counts, bucket_count, has_comm_hook, issued_counts, ranks_of, since
from ddpstats._observe.torch_compat import gradient_hooks, norm_each, stored_values
from ddpstats._ranks.device import widest_float

NO_GRADIENT = -1.0


def measure(gradients: Sequence[Tensor | None]) -> Tensor:
    """Return a norm per gradient, float64 on the host; `NO_GRADIENT` for None.

    It is the 2-norm on the CPU, the largest magnitude elsewhere: bit for bit what `GradientWatch` measures.
    """
    result = torch.full((len(gradients),), NO_GRADIENT, dtype=torch.float64, device="cpu")
    indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if indices:
        with torch.no_grad():
            values = [elements(gradient) for gradient in gradients if gradient is not None]
            norms = as_vector(norms_of(values))
            result[torch.tensor(indices, device="cpu")] = correct_overflows(values, norms.cpu()).to(torch.float64)
    return result


def any_bad(gradients: Sequence[Tensor | None], norms: Sequence[Tensor] = ()) -> bool:
    """Return whether any element of a gradient, or any of ``norms``, is not finite. Waits once for each device."""
    with torch.no_grad():
        values = [elements(gradient) for gradient in gradients if gradient is not None]
        vectors = [*([as_vector(norms_of(values))] if values else []), *norms]
        if not vectors:
            return False
        device = vectors[0].device
        if math.isfinite(torch.cat([vector.to(device, widest_float(device)) for vector in vectors]).sum().item()):
            return False
        on_host = [measure(values), *(vector.to("cpu", torch.float64) for vector in norms)]
        return not bool(torch.cat(on_host).isfinite().all())


def norm_kind(device: torch.device) -> str:
    """Return which norm is measured on a kind of device."""
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
        # A small parameter's shard is empty on some ranks, and torch refuses the largest magnitude of nothing.
        values = [gradient if gradient.numel() else gradient.new_zeros(1) for gradient in gradients]
        return list(norm_each(values, math.inf))
    half = gradients[0].dtype in (torch.float16, torch.bfloat16)
    return list(norm_each(gradients, 2, dtype=torch.float32 if half else None))


def as_vector(norms: list[Tensor]) -> Tensor:
    """Return one vector of the widest dtype, on their device if they share it, otherwise on the host."""
    try:
        return torch.stack(norms)
    except RuntimeError:  # several devices
        return torch.stack([norm.cpu() for norm in norms])


def correct_overflows(gradients: list[Tensor], norms: Tensor) -> Tensor:
    """Return the norms, corrected where the 2-norm of finite numbers overflowed."""
    for index in (~norms.isfinite()).nonzero().flatten().tolist():
        if bool(gradients[index].isfinite().all()):
            norms = norms.to(torch.float64)
            gradient = gradients[index]
            wide = torch.linalg.vector_norm(gradient.to(torch.complex128 if gradient.is_complex() else torch.float64))
            norms[index] = min(wide.item(), torch.finfo(torch.float64).max)
    return norms


def held_values(gradient: Tensor) -> Tensor:
    """Return the numbers this rank holds of it: a DTensor's shard, what a sparse or nested tensor stores."""
    if is_sharded(gradient):
        gradient = gradient.to_local()  # type: ignore[attr-defined]
    if gradient.is_sparse:
        return stored_values(gradient)
    return gradient.values() if gradient.is_nested else gradient


def parts_of(name: str, gradient: Tensor) -> dict[str, Tensor]:
    """Return ordinary tensors by name: a sparse gradient's indices and values, otherwise what is held."""
    if not is_sparse(gradient):
        return {name: held_values(gradient)}
    gradient = gradient.coalesce()
    return {f"{name} (indices)": gradient.indices(), f"{name} (values)": gradient.values()}


def elements(gradient: Tensor) -> Tensor:
    """Return its `held_values`, but each element of a sparse gradient once: it may hold several parts of one."""
    if type(gradient) is Tensor and gradient.layout is torch.strided and not gradient.is_nested:  # nearly every one
        return gradient
    return gradient.coalesce().values() if is_sparse(gradient) else held_values(gradient)


def is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.sparse_coo


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


# -- backward passes of one micro-batch ---------------------------------------------------------------------------


@dataclass
class BackwardPass:
    """The norms of one backward pass's gradients, and whether these are reduced.

    Attributes:
        first: the number of the micro-batch's first pass since the forward pass began.
        measured: indices of parameters, and the norms of their gradients.
        exchanged: the gradients are reduced after this pass.
        issued: collectives since the forward pass began, when the pass had ended; None while it goes on.
        end: the counts at that time.
    """

    first: int
    measured: list[tuple[list[int], Tensor]] = field(default_factory=list)
    exchanged: bool = False
    issued: Counts | None = None
    end: Counts = field(default_factory=dict)

    def bad_indices(self) -> list[int]:
        """Return the parameters whose gradient was not finite, as they came: the loss's end first."""
        order: dict[int, None] = {}
        for indices, norms in self.measured:
            finite = norms.isfinite().tolist()
            order.update({index: None for index, ok in zip(indices, finite, strict=True) if not ok})
        return list(order)


@dataclass
class BackwardNorms:
    """The gradients of one micro-batch's backward passes: whose, how large. Read only when there is a reason to.

    Attributes:
        parameters: all, of which a pass may bring gradients for some.
        replicas: the model's DistributedDataParallel.
        at_once: each gradient is measured when it arrives, not at the end of the pass.
        start: collectives until the last forward pass began.
        first: how many backward passes there were by then.
        tasks: autograd's graph tasks whose end has been asked for; the first one of a pass is the outermost.
        waiting: indices of parameters whose gradient has arrived and is not yet measured.
        kept: index of a parameter -> its own gradient, kept because one was bad.
    """

    parameters: Sequence[Tensor]
    replicas: Sequence[nn.parallel.DistributedDataParallel]
    at_once: bool
    start: Counts
    first: int = 0
    passes: list[BackwardPass] = field(default_factory=list)
    tasks: set[int] = field(default_factory=set)
    waiting: list[int] = field(default_factory=list)
    kept: dict[int, Tensor] = field(default_factory=dict)

    def count_from_here(self) -> None:
        """Start counting at a forward pass that begins."""
        self.start, self.first = issued_counts(), len(self.passes)

    def close_pass(self) -> None:
        """Note the end of the last pass. Idempotent."""
        if self.passes and self.passes[-1].issued is None:
            self.passes[-1].issued, self.passes[-1].end = since(self.start), issued_counts()

    def note_reduction(self) -> None:
        """Note, when the next micro-batch begins, that the program may have reduced gradients since the last pass."""
        if self.passes and since(self.passes[-1].end):
            self.passes[-1].exchanged = True

    @property
    def exchanged(self) -> list[bool]:
        """For each pass, whether its gradients were reduced afterwards, or meanwhile."""
        return [it.exchanged or bool(self._find_foreign(number)) for number, it in enumerate(self.passes)]

    def find_communicating_ranks(self) -> list[tuple[int, ...]]:
        """Return for each pass the ranks with which the program itself communicated; empty for this rank's own."""
        return [ranks_of(self._find_foreign(number)) for number in range(len(self.passes))]

    def _find_foreign(self, number: int) -> list[Any]:
        """Return the groups on which more was issued, until the end of that pass, than DDP issues until then."""
        current = self.passes[number]
        reductions = sum(earlier.exchanged for earlier in self.passes[current.first : number + 1])
        return [
            group
            for group, count in (current.issued or {}).items()
            if count is None or count > sum(_most_collectives(ddp, group, reductions) for ddp in self.replicas)
        ]

    def indices(self) -> set[int]:
        """Return the indices of parameters that got a gradient."""
        return {index for indices, _ in self._all_norms() for index in indices}

    def own_gradients(self) -> dict[int, Tensor] | None:
        """Return index of a parameter -> this rank's own gradient.

        None where not all of them could be kept, or the program's hooks on parameters may have reduced them.
        """
        indices = self.indices()
        if any(self.find_communicating_ranks()) and any(gradient_hooks(self.parameters[index]) for index in indices):
            return None
        return self.kept if self.kept and indices == self.kept.keys() else None

    def norms_on_accelerator(self) -> list[Tensor]:
        """Return the norms that are on an accelerator."""
        return [norms for _, norms in self._all_norms() if not norms.is_cpu]

    def norms(self) -> Tensor | None:
        """Return one per parameter, float64 on the host, `NO_GRADIENT` where none came; None where no gradient came."""
        if not self._all_norms():
            return None
        result = torch.full((len(self.parameters),), NO_GRADIENT, dtype=torch.float64, device="cpu")
        for indices, norms in self._all_norms():
            result[torch.tensor(indices, device="cpu")] = norms.to("cpu", torch.float64)
        return result

    def bad_indices(self) -> list[list[int]]:
        """Return the `BackwardPass.bad_indices` of each pass."""
        return [it.bad_indices() for it in self.passes]

    def _all_norms(self) -> list[tuple[list[int], Tensor]]:
        return [measured for it in self.passes for measured in it.measured]


def _most_collectives(replica: nn.parallel.DistributedDataParallel, group: Any, reductions: int) -> float:
    """Return how many collectives so many of its reductions issue on that group. Asked only when something is wrong."""
    if replica.process_group is not group or not reductions:
        return 0
    if has_comm_hook(replica):
        return math.inf  # a hook may issue any number
    return reductions * (bucket_count(replica) + int(replica.find_unused_parameters))
