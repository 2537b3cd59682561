"""The only file that observes gradients before the reduce; capture and sentinel build on it.

DistributedDataParallel takes one communication hook, and that belongs to the user. So:

1. Every parameter has a hook that runs when its gradient has been accumulated, before DDP hears of it. It notes the
   parameter, and the first one of a backward pass asks autograd to be called at the end of it.
2. There one pass measures all of them: a norm per gradient, which is not finite if and only if some element is not. DDP
   keeps its copies in its buckets until its own callback at the end, which was asked for later and so comes later: at
   this moment the gradients are this rank's own, and the collective is on its way at the same time. A backward pass
   inside another one (reentrant checkpointing) has an end of its own, and DDP may be through by then: so all that
   waits is measured there.
3. The hook measures at once where the end would be too late: gradients that lie in the buckets themselves
   (``gradient_as_bucket_view``), which DDP reduces in place; the first pass of a static graph, which DDP reduces
   before any callback; a parameter with a hook of somebody else, who may reduce its gradient, or take it away.
4. Passes are told apart, and DDP says whether it reduces after one: from then on every rank's gradients hold those of
   all.

On the CPU the norm is the 2-norm, which torch vectorizes, and what it cannot represent is looked at element by element.
On an accelerator it is the largest magnitude, which is exact, in one fused pass; nobody waits for it before `any_bad`.

A gradient that is sharded when it arrives (FSDP2: a DTensor) has been reduced already: `sees_local` is False, and only
`measure` of what the step is left with can be had.

Checked on torch 2.13. It relies on ``Tensor.register_post_accumulate_grad_hook`` (public) and on `_autograd`; on a
torch without ``queue_callback`` every gradient is measured in its hook.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._autograd import graph_task, queue_callback

NO_GRADIENT = -1.0


class GradientWatch:
    """Measures the gradients of ``module`` in every backward pass between `begin` and `end`. Local.

    Args:
        module: as it is trained: DistributedDataParallel itself, or what has it inside.

    Attributes:
        names: of all parameters, as in ``named_parameters`` of the module inside.
        sees_local: whether gradients pass here before they are reduced.
        bad: whether a gradient was not finite since `forget`; only what is on the CPU is judged that soon.
        arrivals: what each micro-batch's backward passes brought, since `forget`.
        observer: called with parameters whose gradient is now this rank's own, and complete for this backward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(unwrapped(module).named_parameters())
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.sees_local = not any(_is_sharded(parameter) for parameter in self.parameters)
        self.arrivals: list[Arrivals] = []
        self.bad = False
        self.observer: Callable[[list[Tensor]], None] | None = None
        self._module = module
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._handles: list[Any] = []
        self._unhooked = [parameter for parameter in self.parameters if self.sees_local]
        self._replicas: list[nn.parallel.DistributedDataParallel] | None = None
        self._static_graph_known = False
        self._active = False
        self._micro = _Running()

    def begin(self) -> None:
        """From now on gradients are measured: a micro-batch begins."""
        if self._unhooked:
            self._hook()
        if self._replicas is None:
            self._replicas = replicas_in(self._module)
        self._micro = _Running(at_once=self._has_to_be_quick(self._replicas))
        self._active = True

    def end(self) -> None:
        """The micro-batch is through: no gradient is measured any more."""
        self._active = False
        self._measure_waiting()  # a backward pass that ended by an error
        self._static_graph_known = self._static_graph_known or any(one.exchanged for one in self._micro.passes)
        self.arrivals.append(Arrivals(self._micro.passes, self._place, self._micro.local))
        self._micro = _Running()

    def forget(self) -> None:
        """The step is over."""
        self.bad = False
        self.arrivals = []

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._unhooked = []

    def _hook(self) -> None:
        """Parameters are hooked when they first want a gradient: a frozen one takes no hook."""
        arrived = _Hook(self)
        frozen = []
        for parameter in self._unhooked:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
                _put_first(parameter, handle.id)
            else:
                frozen.append(parameter)
        self._unhooked = frozen

    def _has_to_be_quick(self, replicas: list[nn.parallel.DistributedDataParallel]) -> bool:
        if queue_callback is None or any(one.gradient_as_bucket_view for one in replicas):
            return True
        return not self._static_graph_known and any(one.static_graph for one in replicas)

    def _arrived(self, parameter: Tensor) -> None:
        micro, task = self._micro, graph_task()
        if task not in micro.tasks:
            if not micro.tasks:
                micro.passes.append(_Pass())
            micro.tasks.add(task)
            if queue_callback is not None:
                queue_callback(lambda: self._task_ends(micro, task))
        if micro.at_once or _has_foreign_hooks(parameter):
            self._measure([parameter])
        else:
            micro.waiting.append(parameter)

    def _task_ends(self, micro: _Running, task: int) -> None:
        self._measure_waiting()
        micro.tasks.discard(task)

    def _measure_waiting(self) -> None:
        waiting, self._micro.waiting = self._micro.waiting, []
        self._measure(waiting)

    def _measure(self, parameters: list[Tensor]) -> None:
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if not parameters:
            return
        if self.observer is not None:
            self.observer(parameters)
        with torch.no_grad():
            gradients = [held_values(parameter.grad) for parameter in parameters]
            norms = _gathered(_norms(gradients))
            if norms.is_cpu:
                norms = self._judged(parameters, gradients, norms)
        current = self._micro.passes[-1]
        current.measured.append((parameters, norms))
        # of DDP: false in no_sync()
        current.exchanged = any(one.require_backward_grad_sync for one in self._replicas or ())

    def _judged(self, parameters: list[Tensor], gradients: list[Tensor], norms: Tensor) -> Tensor:
        """On the CPU: is any of them bad? Then this is the moment to keep them, before they are reduced."""
        if math.isfinite(norms.sum().item()):
            if self.bad:
                self._keep(parameters)
            return norms
        norms = _exact(gradients, norms)
        if not bool(norms.isfinite().all()):
            self.bad = True
            self._keep(parameters)
        return norms

    def _keep(self, parameters: list[Tensor]) -> None:
        kept = {self._place[id(p)]: p.grad.detach().clone() for p in parameters if p.grad is not None}
        self._micro.local.update(kept)


class _Hook:
    """Of every parameter; must not keep the watch alive."""

    def __init__(self, watch: GradientWatch) -> None:
        self._watch = weakref.ref(watch)

    def __call__(self, parameter: Tensor) -> None:
        watch = self._watch()
        if watch is not None and watch._active:
            watch._arrived(parameter)


def _put_first(parameter: Tensor, number: int) -> None:
    """Hooks run in the order of this dict; those that were there before may reduce the gradient, or take it away."""
    hooks = parameter._post_accumulate_grad_hooks
    for other in [one for one in hooks if one != number]:
        hooks[other] = hooks.pop(other)


def _has_foreign_hooks(parameter: Tensor) -> bool:
    hooks = parameter._post_accumulate_grad_hooks
    return len(hooks) > 1 and not all(isinstance(hook, _Hook) for hook in hooks.values())


@dataclass
class _Pass:
    """One backward pass: whose gradients it brought, how large; whether they are reduced afterwards."""

    measured: list[tuple[list[Tensor], Tensor]] = field(default_factory=list)
    exchanged: bool = False


@dataclass
class _Running:
    """A micro-batch under way.

    Attributes:
        tasks: autograd's graph tasks whose end has been asked for; the first one of a pass is the outermost.
        waiting: parameters whose gradient has arrived and is not yet measured.
        local: place of a parameter -> its own gradient, kept because one was bad.
    """

    at_once: bool = False
    passes: list[_Pass] = field(default_factory=list)
    tasks: set[int] = field(default_factory=set)
    waiting: list[Tensor] = field(default_factory=list)
    local: dict[int, Tensor] = field(default_factory=dict)


class Arrivals:
    """What one micro-batch's backward passes brought: whose gradients, how large. Read when there is a reason to."""

    def __init__(self, passes: list[_Pass], place: dict[int, int], local: dict[int, Tensor]) -> None:
        self._passes, self._place, self._local = passes, place, local

    @property
    def exchanged(self) -> list[bool]:
        """Of each pass: whether its gradients were reduced afterwards."""
        return [one.exchanged for one in self._passes]

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


def _bad_places(one: _Pass, place: dict[int, int]) -> list[int]:
    order: dict[int, None] = {}
    for parameters, norms in one.measured:
        finite = norms.isfinite().tolist()
        order.update({place[id(p)]: None for p, ok in zip(parameters, finite, strict=True) if not ok})
    return list(order)


def replicas_in(module: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    """Every DistributedDataParallel in ``module``; or, where there is none, around it.

    A module does not know what it is inside of, so that one is looked for among all objects; once.
    """
    inside = [one for one in module.modules() if isinstance(one, nn.parallel.DistributedDataParallel)]
    if inside or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return inside
    everything = (one for one in gc.get_objects() if issubclass(type(one), nn.parallel.DistributedDataParallel))
    return [one for one in everything if one.module is module]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a DistributedDataParallel; any other module itself."""
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    assert isinstance(inner, nn.Module)
    return inner


def measure(gradients: Sequence[Tensor | None]) -> Tensor:
    """A norm per gradient, not finite if and only if some element is not; `NO_GRADIENT` for None. float64, on the host.

    The 2-norm on the CPU, the largest magnitude elsewhere: bit for bit what `GradientWatch` measures.
    """
    found = torch.full((len(gradients),), NO_GRADIENT, dtype=torch.float64, device="cpu")
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    if places:
        with torch.no_grad():
            values = [held_values(gradient) for gradient in gradients if gradient is not None]
            norms = _gathered(_norms(values))
            found[torch.tensor(places, device="cpu")] = _exact(values, norms.cpu()).to(torch.float64)
    return found


def any_bad(gradients: Sequence[Tensor | None], norms: Sequence[Tensor] = ()) -> bool:
    """Whether any element of any gradient, or any of ``norms``, is not finite. Waits once for each device."""
    with torch.no_grad():
        values = [held_values(gradient) for gradient in gradients if gradient is not None]
        found = [*([_gathered(_norms(values))] if values else []), *norms]
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


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """Element for element, as 0-d tensors on the gradients' devices; one call per device and dtype."""
    if len({gradient.dtype for gradient in gradients}) == 1 and len({gradient.device for gradient in gradients}) == 1:
        return _norms_of_a_kind(gradients)
    kinds = {(gradient.device, gradient.dtype) for gradient in gradients}
    found: list[Tensor | None] = [None] * len(gradients)
    for kind in kinds:
        places = [place for place, gradient in enumerate(gradients) if (gradient.device, gradient.dtype) == kind]
        norms = _norms_of_a_kind([gradients[place] for place in places])
        for place, norm in zip(places, norms, strict=True):
            found[place] = norm
    return [norm for norm in found if norm is not None]


def _norms_of_a_kind(gradients: list[Tensor]) -> list[Tensor]:
    if not gradients[0].is_cpu:
        return list(torch._foreach_norm(gradients, math.inf))
    half = gradients[0].dtype in (torch.float16, torch.bfloat16)
    return list(torch._foreach_norm(gradients, 2, dtype=torch.float32 if half else None))


def _gathered(norms: list[Tensor]) -> Tensor:
    """One vector: on their device if they share it, else on the host; of the widest dtype."""
    try:
        return torch.stack(norms)
    except RuntimeError:  # several devices
        return torch.stack([norm.cpu() for norm in norms])


def _exact(gradients: list[Tensor], norms: Tensor) -> Tensor:
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
    if _is_sharded(gradient):
        gradient = gradient.to_local()  # type: ignore[attr-defined]
    if gradient.is_sparse:
        return gradient._values()
    return gradient.values() if gradient.is_nested else gradient


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")
