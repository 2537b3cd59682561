"""The tensors that a rank holds, each with its name and a description by which ranks compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpstats._base.wording import dtype_name
from ddpstats.sentinel._divergence import Kind

_PLAIN_TENSOR = Tensor.__torch_dispatch__


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. ``tensor`` is None where there is nothing to compare but its description."""

    kind: Kind
    name: str
    described: str
    tensor: Tensor | None


def entry_of(kind: Kind, name: str, tensor: Tensor | None) -> TensorEntry:
    if tensor is None:
        return TensorEntry(kind, name, "none", None)
    if nn.parameter.is_lazy(tensor):
        return TensorEntry(kind, name, "not initialized yet", None)
    described = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    ordinary = type(tensor).__torch_dispatch__ is _PLAIN_TENSOR and tensor.layout is torch.strided
    if not ordinary or tensor.is_meta or tensor.is_quantized:
        return TensorEntry(
            kind, name, f"{described}, {type(tensor).__name__}, {tensor.layout}, cannot be compared", None
        )
    return TensorEntry(kind, name, described, tensor)


def gradient_entries(name: str, parameter: Tensor) -> list[TensorEntry]:
    gradient = None if nn.parameter.is_lazy(parameter) else parameter.grad
    if gradient is not None and gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce()
        indices = entry_of("gradient", f"{name} (indices)", gradient.indices())
        return [indices, entry_of("gradient", f"{name} (values)", gradient.values())]
    return [entry_of("gradient", name, gradient)]


def tensors_of(entries: Sequence[TensorEntry]) -> list[Tensor]:
    return [entry.tensor for entry in entries if entry.tensor is not None]
