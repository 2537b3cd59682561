"""The only file that observes gradients before they are reduced: this rank's own.

DistributedDataParallel takes one communication hook, and that belongs to the user. So:

1. Every parameter has a hook that runs when its gradient has been accumulated, before DDP's hook. It notes the
   parameter, and the first one of a backward pass asks autograd for a callback at the end of it.
2. That callback measures all of them: a norm per gradient, which is not finite if and only if some element is not. DDP
   keeps its copies in its buckets until its own callback, which was asked for later and so comes later: at this moment
   the gradients are this rank's own, while the collective already runs. A backward pass inside another one (reentrant
   checkpointing) ends earlier, and DDP may be done by then: so all that waits is measured there.
3. The hook measures at once where the end would be too late: gradients that are in the buckets themselves
   (``gradient_as_bucket_view``), which DDP reduces in place; the first pass of a static graph, which DDP reduces
   before any callback; sparse ones, of which DDP has no copies; a parameter with another hook of the program, which may
   reduce its gradient, or take it away.
4. Each pass is kept by itself, and DDP says whether it reduces after one: from then on every rank's gradients hold
   those of all.
5. A program may reduce by itself: in hooks on its tensors or on autograd's nodes, in its own ``backward``. Its
   collectives are counted (`groups.issued_counts`), and the gradients of a pass with one may already be reduced: they
   are not called this rank's own.

A gradient that is sharded when it arrives (FSDP2: a DTensor) has been reduced already: `sees_local` is False, and only
`measure` of what the step is left with can be had.

Checked on torch 2.13. It relies on ``Tensor.register_post_accumulate_grad_hook`` (public); on a torch without
`queue_callback` every gradient is measured in its hook.
"""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ddpstats._base.lazy import breaks_graph
from ddpstats._observe.gradient_norms import (
    BackwardNorms,
    BackwardPass,
    as_vector,
    correct_overflows,
    elements,
    is_sharded,
    is_sparse,
    norms_of,
)
from ddpstats._observe.groups import issued_counts
from ddpstats._observe.torch_compat import accumulated_hooks, graph_task, in_backward, queue_callback, without_compile


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
        named = list(unwrap(module).named_parameters())
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.sees_local = not any(is_sharded(parameter) for parameter in self.parameters)
        self.arrivals: list[BackwardNorms] = []
        self.bad = False
        self.observer: Callable[[list[Tensor], list[Tensor]], None] | None = None
        self._module = module
        self._handles: list[Any] = []
        self._unhooked = list(range(len(self.parameters))) if self.sees_local else []
        self._replicas: list[nn.parallel.DistributedDataParallel] | None = None
        self._static_graph_known = False
        self._micro: BackwardNorms | None = None

    def begin(self) -> None:
        """Begin a micro-batch: from now on gradients are measured."""
        self._hook()
        if self._replicas is None:
            self._replicas = replicas_in(self._module)
            inner = unwrap(self._module)
            hook = ForwardBegins(inner, self, GradientWatch._forward_begins, inner is not self._module)
            self._handles.append(inner.register_forward_pre_hook(hook))
        if self.arrivals and not self._replicas:
            self.arrivals[-1].note_reduction()
        at_once = self._has_to_be_quick(self._replicas)
        self._micro = BackwardNorms(self.parameters, self._replicas, at_once, issued_counts())

    def end(self) -> None:
        """End the micro-batch: no gradient is measured any more."""
        micro, self._micro = self._micro, None
        if micro is None:
            return
        self._measure_waiting(micro)  # a backward pass that ended by an error
        micro.close_pass()
        self._static_graph_known = self._static_graph_known or any(it.exchanged for it in micro.passes)
        self.arrivals.append(micro)

    def forget(self) -> None:
        """End the step."""
        self.bad = False
        self.arrivals = []

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        self._micro = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._unhooked = []

    def _hook(self) -> None:
        """Hook the parameters that want a gradient for the first time: a frozen one takes no hook."""
        wanting = [index for index in self._unhooked if self.parameters[index].requires_grad]
        for index in wanting:
            parameter = self.parameters[index]
            hook = _ArrivalHook(self, index)
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
            _put_first(accumulated_hooks(parameter), handle.id)
        if wanting:
            self._unhooked = [index for index in self._unhooked if index not in set(wanting)]

    def _has_to_be_quick(self, replicas: list[nn.parallel.DistributedDataParallel]) -> bool:
        if queue_callback is None or any(replica.gradient_as_bucket_view for replica in replicas):
            return True
        return not self._static_graph_known and any(replica.static_graph for replica in replicas)

    def _forward_begins(self, compiled: bool) -> None:
        """Count the program's own collectives from here: DDP has issued those that it issues before a forward pass."""
        if self._micro is not None and not in_backward():
            self._micro.count_from_here()

    def _gradient_arrives(self, micro: BackwardNorms, index: int) -> None:
        task, parameter = graph_task(), self.parameters[index]
        if task not in micro.tasks:
            self._note_task(micro, task)
        micro.waiting.append(index)
        has_foreign_hooks = not all(isinstance(hook, _ArrivalHook) for hook in accumulated_hooks(parameter).values())
        if micro.at_once or has_foreign_hooks or is_sparse(parameter.grad):
            self._measure(micro, [micro.waiting.pop()])

    def _note_task(self, micro: BackwardNorms, task: int) -> None:
        """Note the first gradient of a graph task of autograd's."""
        if not micro.tasks:
            micro.close_pass()
            micro.passes.append(BackwardPass(micro.first))
        micro.tasks.add(task)
        if queue_callback is not None:
            queue_callback(lambda: self._task_ends(micro, task))

    def _task_ends(self, micro: BackwardNorms, task: int) -> None:
        self._measure_waiting(micro)
        micro.tasks.discard(task)
        if not micro.tasks:
            micro.close_pass()

    def _measure_waiting(self, micro: BackwardNorms) -> None:
        waiting, micro.waiting = micro.waiting, []
        self._measure(micro, waiting)

    def _measure(self, micro: BackwardNorms, indices: list[int]) -> None:
        own = {index: grad for index in indices if (grad := self.parameters[index].grad) is not None}
        if not own:
            return
        if self.observer is not None:
            self.observer([self.parameters[index] for index in own], [*own.values()])
        with torch.no_grad():
            gradients = [elements(gradient) for gradient in own.values()]
            norms = as_vector(norms_of(gradients))
            if norms.is_cpu:
                if not math.isfinite(norms.sum().item()):
                    norms = correct_overflows(gradients, norms)
                    self.bad = self.bad or not bool(norms.isfinite().all())
                if self.bad:  # kept before they are reduced
                    micro.kept.update({index: gradient.detach().clone() for index, gradient in own.items()})
        current = micro.passes[-1]
        current.measured.append(([*own], norms))
        # DDP sets it to False in no_sync().
        current.exchanged |= any(replica.require_backward_grad_sync for replica in micro.replicas)


class _ArrivalHook:
    """The hook on every parameter; it must not keep the watch alive."""

    def __init__(self, watch: GradientWatch, index: int) -> None:
        self._watch, self._index = weakref.ref(watch), index

    def __call__(self, parameter: Tensor) -> None:
        watch = self._watch()
        if watch is not None and watch._micro is not None:
            watch._gradient_arrives(watch._micro, self._index)


def _put_first(hooks: Any, number: int) -> None:
    """Let a hook run before the others, which may reduce the gradient, or take it away: they run in this order."""
    for key in [key for key in hooks if key != number]:
        hooks[key] = hooks.pop(key)


def replicas_in(module: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    """Return every DistributedDataParallel in ``module``; where it has none, the one around it.

    A module does not know what contains it, so that one is looked for among all objects of the process: a second where
    these are many.
    """
    inside = [child for child in module.modules() if isinstance(child, nn.parallel.DistributedDataParallel)]
    if inside or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return inside
    replicas = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.parallel.DistributedDataParallel))
    return [replica for replica in replicas if replica.module is module]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel, also where that was compiled; any other module itself."""
    replica = without_compile(module)
    inner = replica.module if isinstance(replica, nn.parallel.DistributedDataParallel) else module
    assert isinstance(inner, nn.Module)
    return inner


# -- hooks on a user's module, which may be copied while it is hooked ------------------------------------------------

T = TypeVar("T")


class ModuleHook:
    """Base of what is registered on a module and acts for that module, never for a copy of it.

    The module may be pickled and copied (``torch.save``, ``copy.deepcopy``) while it is hooked: there it gets a hook
    that does nothing, and that needs no ddpstats where the module is loaded.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments, returns None


class ForwardBegins(ModuleHook):
    """Calls ``call(owner, compiled)`` before a forward pass of ``module``, not of a copy; keeps neither of them alive.

    Where the forward pass is compiled, hooks and all, a module ``in_replica`` (a DistributedDataParallel, which breaks
    the graph by itself) has it broken here, too. Any other is run without a call: the graph may have to be whole.
    """

    def __init__(self, module: Any, owner: T, call: Callable[[T, bool], None], in_replica: bool) -> None:
        self._module, self._owner, self._call = weakref.ref(module), weakref.ref(owner), call
        self._breaks = in_replica

    def __call__(self, module: Any, args: Any) -> None:
        compiled = torch.compiler.is_compiling()
        if self._breaks or not compiled:
            self._begins(module, compiled)

    @breaks_graph
    def _begins(self, module: Any, compiled: bool) -> None:
        owner = self._owner()
        if owner is not None and module is self._module():
            self._call(owner, compiled)
