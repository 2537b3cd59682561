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
   before any callback; sparse ones, of which DDP has no copies; a parameter with a hook of somebody else, who may
   reduce its gradient, or take it away.
4. Passes are told apart, and DDP says whether it reduces after one: from then on every rank's gradients hold those of
   all.
5. A program may reduce by itself. Where a parameter has hooks of ``Tensor.register_hook``, one of ours is put before
   them: if a collective is issued between that one and the hook of 1, they have reduced the gradient, and what counts
   is what it was before. Other collectives of the program's in a backward pass (a hook on a tensor between the layers,
   on autograd's own nodes, in a ``backward`` of its own) cannot be looked behind: they are counted
   (`own_reductions`), and a gradient that came after one is not called this rank's own. Where nothing in the model is
   DDP, gradients are measured in their hooks as long as it is not known that a backward pass issues none.

On the CPU the norm is the 2-norm, which torch vectorizes, and what it cannot represent is looked at element by element.
On an accelerator it is the largest magnitude, which is exact, in one fused pass; nobody waits for it before `any_bad`.

A gradient that is sharded when it arrives (FSDP2: a DTensor) has been reduced already: `sees_local` is False, and only
`measure` of what the step is left with can be had.

Checked on torch 2.13. It relies on ``Tensor.register_post_accumulate_grad_hook`` (public); on a torch without
`queue_callback` every gradient is measured in its hook. Hooks of one tensor run in the order of its `gradient_hooks`,
before those of ``Node.register_prehook``.
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

from ddpstats._observe.module_hooks import ModuleHook
from ddpstats._observe.own_reductions import Counts, issued, plus, ranks_of, since
from ddpstats._observe.torch_compat import (
    accumulated_hooks,
    bucket_count,
    gradient_hooks,
    graph_task,
    has_comm_hook,
    in_backward,
    norm_each,
    queue_callback,
    stored_values,
)

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
        observer: called with parameters and their gradients, which are this rank's own, and complete for this backward
            pass.
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(unwrapped(module).named_parameters())
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.sees_local = not any(_is_sharded(parameter) for parameter in self.parameters)
        self.arrivals: list[BackwardNorms] = []
        self.bad = False
        self.observer: Callable[[list[Tensor], list[Tensor]], None] | None = None
        self._module = module
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._handles: list[Any] = []
        self._unhooked = [parameter for parameter in self.parameters if self.sees_local]
        self._replicas: list[nn.parallel.DistributedDataParallel] | None = None
        self._static_graph_known = False
        self._communicates: bool | None = None  # in its backward passes, by itself
        self._early = _EarlyHooks(self)
        self._active = False
        self._micro = _WatchedMicroBatch()

    def begin(self) -> None:
        """From now on gradients are measured: a micro-batch begins."""
        if self._unhooked:
            self._hook()
        if self._replicas is None:
            self._replicas = replicas_in(self._module)
            inner = unwrapped(self._module)
            self._handles.append(inner.register_forward_pre_hook(_ForwardBegins(self, inner)))
        self._early.update()
        if self.arrivals and not self._replicas:
            self.arrivals[-1].note_reduction()
        self._micro = _WatchedMicroBatch(at_once=self._has_to_be_quick(self._replicas), start=issued())
        self._active = True

    def end(self) -> None:
        """The micro-batch is through: no gradient is measured any more."""
        self._active = False
        micro = self._micro
        self._measure_waiting()  # a backward pass that ended by an error
        micro.close_pass()
        self._static_graph_known = self._static_graph_known or any(one.exchanged for one in micro.passes)
        if micro.passes:
            self._communicates = bool(self._communicates) or any(one.issued for one in micro.passes)
        self.arrivals.append(BackwardNorms(micro.passes, self._place, micro.local, self._replicas or []))
        self._micro = _WatchedMicroBatch()

    def forget(self) -> None:
        """The step is over."""
        self.bad = False
        self.arrivals = []

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._early.close()
        self._handles = []
        self._unhooked = []

    def _hook(self) -> None:
        """Parameters are hooked when they first want a gradient: a frozen one takes no hook."""
        arrived = _ArrivalHook(self)
        frozen = []
        for parameter in self._unhooked:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
                _put_first(accumulated_hooks(parameter), handle.id)
            else:
                frozen.append(parameter)
        self._unhooked = frozen

    def _has_to_be_quick(self, replicas: list[nn.parallel.DistributedDataParallel]) -> bool:
        if queue_callback is None or any(one.gradient_as_bucket_view for one in replicas):
            return True
        if not replicas and self._communicates is not False and issued():
            return True
        return not self._static_graph_known and any(one.static_graph for one in replicas)

    def _forward_begins(self) -> None:
        """By now DDP has done what it does before: collectives of the program's own count from here."""
        if not in_backward():
            self._micro.count_from_here()

    def _about_to_arrive(self, place: int, gradient: Tensor) -> None:
        """Before the program's own hooks have seen it."""
        with torch.no_grad():
            values = [_elements(gradient)]
            norms = _gathered(_norms(values))
            norms = _exact(values, norms) if norms.is_cpu else norms
            is_bad = norms.is_cpu and not bool(norms.isfinite().all())
            keeps = is_bad or self.bad or bool(self._micro.local) or self.observer is not None
            kept = gradient.detach().clone() if keeps else None
        self._micro.early[place] = _Early(norms, kept, issued())

    def _arrived(self, parameter: Tensor) -> None:
        micro, place = self._micro, self._place[id(parameter)]
        self._note_task(micro)
        early = micro.early.pop(place, None)
        between = {} if early is None else since(early.counts)
        if early is not None and between:
            micro.start = plus(micro.start, between)
        # under DDP of the pass's first one alone: a NaN of the loss is in it, and to count costs as much as to measure
        if micro.at_once or (self._replicas and not micro.passes[-1].arrived):
            if micro.is_quiet():
                micro.passes[-1].quiet.add(place)
            elif early is None and not self._replicas and gradient_hooks(parameter):
                self._early.stay(place)
        micro.passes[-1].arrived = True
        if early is not None and between:
            self._take_early(parameter, place, early)
        elif micro.at_once or _has_foreign_hooks(parameter) or _is_sparse(parameter.grad):
            self._measure([parameter])
        else:
            micro.waiting.append(parameter)

    def _note_task(self, micro: _WatchedMicroBatch) -> None:
        task = graph_task()
        if task not in micro.tasks:
            if not micro.tasks:
                micro.close_pass()
                micro.passes.append(_BackwardPass(micro.first))
            micro.tasks.add(task)
            if queue_callback is not None:
                queue_callback(lambda: self._task_ends(micro, task))

    def _task_ends(self, micro: _WatchedMicroBatch, task: int) -> None:
        self._measure_waiting()
        micro.tasks.discard(task)
        if not micro.tasks:
            micro.close_pass()

    def _take_early(self, parameter: Tensor, place: int, early: _Early) -> None:
        """The program's hooks have reduced it: what it was before counts. Whether that was bad, the end will show."""
        current = self._micro.passes[-1]
        current.measured.append(([parameter], early.norms))
        current.exchanged = True
        current.early.add(place)
        if early.gradient is not None:
            if self.observer is not None:
                self.observer([parameter], [early.gradient])
            if self.bad or self._micro.local or not bool(early.norms.isfinite().all()):
                self._micro.local[place] = early.gradient

    def _measure_waiting(self) -> None:
        waiting, self._micro.waiting = self._micro.waiting, []
        self._measure(waiting)

    def _measure(self, parameters: list[Tensor]) -> None:
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if not parameters:
            return
        if self.observer is not None:
            self.observer(parameters, [parameter.grad for parameter in parameters if parameter.grad is not None])
        with torch.no_grad():
            gradients = [_elements(parameter.grad) for parameter in parameters]
            norms = _gathered(_norms(gradients))
            if norms.is_cpu:
                norms = self._judged(parameters, gradients, norms)
        current = self._micro.passes[-1]
        current.measured.append((parameters, norms))
        # of DDP: false in no_sync()
        current.exchanged |= any(one.require_backward_grad_sync for one in self._replicas or ())

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


class _ArrivalHook:
    """Of every parameter; must not keep the watch alive."""

    def __init__(self, watch: GradientWatch) -> None:
        self._watch = weakref.ref(watch)

    def __call__(self, parameter: Tensor) -> None:
        watch = self._watch()
        if watch is not None and watch._active:
            watch._arrived(parameter)


class _ForwardBegins(ModuleHook):
    """Of the module inside, and of no copy of it; must not keep the watch alive."""

    def __init__(self, watch: GradientWatch, module: nn.Module) -> None:
        self._watch, self._module = weakref.ref(watch), weakref.ref(module)

    def __call__(self, module: nn.Module, args: Any) -> None:
        watch = self._watch()
        if watch is not None and watch._active and module is self._module():
            watch._forward_begins()


class _EarlyHooks:
    """Hooks on the gradients of those parameters that have hooks of somebody else there; before these."""

    def __init__(self, watch: GradientWatch) -> None:
        self._watch, self._parameters = weakref.ref(watch), watch.parameters if watch.sees_local else []
        self._handles: dict[int, Any] = {}
        self._staying: set[int] = set()

    def update(self) -> None:
        """As hooks are now: somebody may have registered more, or taken his away. Takes a look at every parameter."""
        for place, parameter in enumerate(self._parameters):
            hooks = gradient_hooks(parameter)
            if hooks or place in self._handles:
                self._update_one(place, parameter, hooks or {})

    def stay(self, place: int) -> None:
        """The program registers its hooks on that parameter shortly before they run."""
        if place not in self._staying:
            self._staying.add(place)
            self._update_one(place, self._parameters[place], gradient_hooks(self._parameters[place]) or {})

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._parameters = {}, []

    def _update_one(self, place: int, parameter: Tensor, hooks: dict[int, Any]) -> None:
        handle = self._handles.get(place)
        foreign = place in self._staying or any(type(one) is not _EarlyHook for one in hooks.values())
        wanted = parameter.requires_grad and foreign
        if handle is not None and not (wanted and handle.id in hooks):
            self._handles.pop(place).remove()
            handle = None
        if handle is None and wanted:
            hook = _EarlyHook(self._watch, place)
            handle = self._handles[place] = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            _put_first(gradient_hooks(parameter), handle.id)


class _EarlyHook:
    """Of one parameter; must not keep the watch alive."""

    __torch_unserializable__ = True  # it is not missed in a copy of the parameter: no warning

    def __init__(self, watch: weakref.ref[GradientWatch], place: int) -> None:
        self._watch, self._place = watch, place

    def __call__(self, gradient: Tensor | None) -> None:
        watch = self._watch()
        if watch is not None and watch._active and gradient is not None:
            watch._about_to_arrive(self._place, gradient)


def _put_first(hooks: Any, number: int) -> None:
    """Hooks run in the order of this dict; those that were there before may reduce the gradient, or take it away."""
    for other in [one for one in hooks if one != number]:
        hooks[other] = hooks.pop(other)


def _has_foreign_hooks(parameter: Tensor) -> bool:
    hooks = accumulated_hooks(parameter)
    return len(hooks) > 1 and not all(isinstance(hook, _ArrivalHook) for hook in hooks.values())


@dataclass
class _BackwardPass:
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
class _Early:
    """A gradient before the program's hooks on it: its norm, itself where it may be needed, collectives until then."""

    norms: Tensor
    gradient: Tensor | None
    counts: Counts


@dataclass
class _WatchedMicroBatch:
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
    passes: list[_BackwardPass] = field(default_factory=list)
    tasks: set[int] = field(default_factory=set)
    waiting: list[Tensor] = field(default_factory=list)
    local: dict[int, Tensor] = field(default_factory=dict)
    early: dict[int, _Early] = field(default_factory=dict)
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
        passes: list[_BackwardPass],
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


def _bad_places(one: _BackwardPass, place: dict[int, int]) -> list[int]:
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
            values = [_elements(gradient) for gradient in gradients if gradient is not None]
            norms = _gathered(_norms(values))
            found[torch.tensor(places, device="cpu")] = _exact(values, norms.cpu()).to(torch.float64)
    return found


def any_bad(gradients: Sequence[Tensor | None], norms: Sequence[Tensor] = ()) -> bool:
    """Whether any element of any gradient, or any of ``norms``, is not finite. Waits once for each device."""
    with torch.no_grad():
        values = [_elements(gradient) for gradient in gradients if gradient is not None]
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
        return list(norm_each(gradients, math.inf))
    half = gradients[0].dtype in (torch.float16, torch.bfloat16)
    return list(norm_each(gradients, 2, dtype=torch.float32 if half else None))


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
        return stored_values(gradient)
    return gradient.values() if gradient.is_nested else gradient


def parts_of(name: str, gradient: Tensor) -> dict[str, Tensor]:
    """As ordinary tensors with names: of a sparse gradient, its indices and the values there; else what is held."""
    if not _is_sparse(gradient):
        return {name: held_values(gradient)}
    gradient = gradient.coalesce()
    return {f"{name} (indices)": gradient.indices(), f"{name} (values)": gradient.values()}


def _elements(gradient: Tensor | None) -> Tensor:
    """What `held_values` gives, but of a sparse gradient each element once: it may hold several parts of one."""
    return gradient.coalesce().values() if gradient is not None and _is_sparse(gradient) else held_values(gradient)


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.sparse_coo


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")
