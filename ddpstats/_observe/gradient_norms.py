"""How large gradients are, and the numbers in them: a norm is not finite if and only if some element is not.

On the CPU the norm is the 2-norm, which torch vectorizes, and what it cannot represent is looked at element by element.
On an accelerator it is the largest magnitude, which is exact, in one fused pass; nobody waits for it before `any_bad`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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
