"""The only file that observes gradients before the reduce; capture and sentinel build on it.

DistributedDataParallel takes one communication hook, and that belongs to the user. So:

1. Every parameter has a hook that runs when its gradient has been accumulated, before DDP hears of it. It notes the
   parameter, and the first one of a backward pass asks autograd to be called at the end of it.
2. There one pass measures all of them: a norm per gradient, which is not finite if and only if some element is not. DDP
   keeps its copies in its buckets until its own callback at the end, which was asked for later and so comes later: at
   this moment the gradients are this rank's own, and the collective is on its way at the same time.
3. Where gradients lie in the buckets themselves (``gradient_as_bucket_view``), the hook measures at once: behind it,
   DDP reduces in place.

On the CPU the norm is the 2-norm, which torch vectorizes, and what it cannot represent is looked at element by element.
On an accelerator it is the largest magnitude, which is exact, in one fused pass; nobody waits for it before `any_bad`.

A gradient that is sharded when it arrives (FSDP2: a DTensor) has been reduced already: `sees_local` is False, and only
`measure` of what the step is left with can be had.

Checked on torch 2.13. It relies on ``Tensor.register_post_accumulate_grad_hook`` (public) and on the autograd engine's
``queue_callback``, which DDP and FSDP use themselves; on a torch without it every gradient is measured in its hook.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_queue_callback: Callable[[Callable[[], None]], None] | None = getattr(
    torch.autograd.Variable._execution_engine, "queue_callback", None
)

NO_GRADIENT = -1.0


class GradientWatch:
    """Measures the gradients of ``module`` in every backward pass between `begin` and `end`. Local.

    Args:
        module: as it is trained: DistributedDataParallel itself, not what is inside.

    Attributes:
        names: of all parameters, as in ``named_parameters`` of the module inside.
        sees_local: whether gradients pass here before they are reduced.
        bad: whether a gradient was not finite since `forget`; only what is on the CPU is judged that soon.
        arrivals: what each micro-batch's backward passes brought, since `forget`.
    """

    def __init__(self, module: nn.Module) -> None:
        inner = unwrapped(module)
        named = list(inner.named_parameters())
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.sees_local = not any(_is_sharded(parameter) for parameter in self.parameters)
        self._at_once = _queue_callback is None or bool(getattr(module, "gradient_as_bucket_view", False))
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._handles: list[Any] = []
        self._unhooked = [parameter for parameter in self.parameters if self.sees_local]
        self._active = False
        self._waiting: list[Tensor] = []
        self._measured: list[tuple[list[Tensor], Tensor]] = []
        self._local: dict[int, Tensor] = {}
        self._wrapper = module
        self._exchanged = False
        self.arrivals: list[Arrivals] = []
        self.bad = False

    def begin(self) -> None:
        """From now on gradients are measured: a micro-batch begins."""
        if self._unhooked:
            self._hook()
        self._active = True
        self._measured = []
        self._waiting = []
        self._local = {}
        self._exchanged = False

    def end(self) -> None:
        """The micro-batch is through: no gradient is measured any more."""
        self._active = False
        self._measure_waiting()  # a backward pass that ended by an error
        self.arrivals.append(Arrivals(self._measured, self._place, self._local, self._exchanged))

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
        reference = weakref.ref(self)  # a parameter must not keep the watch alive

        def arrived(parameter: Tensor) -> None:
            watch = reference()
            if watch is not None and watch._active:
                watch._arrived(parameter)

        frozen = []
        for parameter in self._unhooked:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
            else:
                frozen.append(parameter)
        self._unhooked = frozen

    def _arrived(self, parameter: Tensor) -> None:
        self._waiting.append(parameter)
        if self._at_once:
            self._measure_waiting()
        elif len(self._waiting) == 1:
            assert _queue_callback is not None
            _queue_callback(self._measure_waiting)

    def _measure_waiting(self) -> None:
        parameters, self._waiting = self._waiting, []
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if not parameters:
            return
        self._exchanged = bool(getattr(self._wrapper, "require_backward_grad_sync", False))  # of DDP: not in no_sync()
        with torch.no_grad():
            gradients = [_values(parameter.grad) for parameter in parameters]
            norms = _gathered(_norms(gradients))
            if norms.is_cpu:
                norms = self._judged(parameters, gradients, norms)
        self._measured.append((parameters, norms))

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
        self._local.update({self._place[id(p)]: p.grad.detach().clone() for p in parameters if p.grad is not None})


class Arrivals:
    """What one micro-batch's backward passes brought: whose gradients, how large. Read when there is a reason to.

    Attributes:
        exchanged: whether they were reduced afterwards: from then on every rank's gradients hold those of all.
    """

    def __init__(
        self,
        measured: list[tuple[list[Tensor], Tensor]],
        place: dict[int, int],
        local: dict[int, Tensor],
        exchanged: bool = False,
    ) -> None:
        self._measured, self._place, self._local = measured, place, local
        self.exchanged = exchanged

    def local(self) -> dict[int, Tensor] | None:
        """Place of a parameter -> this rank's own gradient; None where not all of them could be kept."""
        arrived = {self._place[id(parameter)] for parameters, _ in self._measured for parameter in parameters}
        return self._local if arrived and arrived == self._local.keys() else None

    def away(self) -> list[Tensor]:
        """The norms that lie on an accelerator."""
        return [norms for _, norms in self._measured if not norms.is_cpu]

    def norms(self) -> Tensor | None:
        """One per parameter of the module, float64, on the host; `NO_GRADIENT` where none came; None without any."""
        if not self._measured:
            return None
        found = torch.full((len(self._place),), NO_GRADIENT, dtype=torch.float64)
        for parameters, norms in self._measured:
            places = torch.tensor([self._place[id(parameter)] for parameter in parameters])
            found[places] = norms.to("cpu", torch.float64)
        return found

    def bad_places(self) -> list[int]:
        """Parameters whose gradient was not finite, in the order in which the gradients came: the loss's end first."""
        order: dict[int, None] = {}
        for parameters, norms in self._measured:
            finite = norms.isfinite().tolist()
            order.update({self._place[id(p)]: None for p, ok in zip(parameters, finite, strict=True) if not ok})
        return list(order)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a DistributedDataParallel; any other module itself."""
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    assert isinstance(inner, nn.Module)
    return inner


def measure(gradients: Sequence[Tensor | None]) -> Tensor:
    """A norm per gradient, not finite if and only if some element is not; `NO_GRADIENT` for None. float64, on the host.

    The 2-norm on the CPU, the largest magnitude elsewhere: bit for bit what `GradientWatch` measures.
    """
    found = torch.full((len(gradients),), NO_GRADIENT, dtype=torch.float64)
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    if places:
        with torch.no_grad():
            values = [_values(gradient) for gradient in gradients if gradient is not None]
            norms = _gathered(_norms(values))
            found[torch.tensor(places)] = _exact(values, norms.cpu()).to(torch.float64)
    return found


def any_bad(gradients: Sequence[Tensor | None], norms: Sequence[Tensor] = ()) -> bool:
    """Whether any element of any gradient, or any of ``norms``, is not finite. Waits once for each device."""
    with torch.no_grad():
        values = [_values(gradient) for gradient in gradients if gradient is not None]
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


def _values(gradient: Tensor | None) -> Tensor:
    """The numbers this rank holds of it."""
    assert gradient is not None
    if _is_sharded(gradient):
        gradient = gradient.to_local()  # type: ignore[attr-defined]
    return gradient._values() if gradient.is_sparse else gradient


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")
