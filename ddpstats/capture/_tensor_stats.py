"""Numbers about one tensor that say where it is not finite."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ddpstats._base.text import dtype_name


@dataclass(frozen=True)
class TensorStats:
    """``low`` and ``high`` are of the finite elements, None without any; ``first`` is the first that is not finite."""

    shape: tuple[int, ...]
    dtype: str
    low: float | None
    high: float | None
    nans: int
    infs: int
    first: tuple[int, ...] | None

    def __str__(self) -> str:
        what = f"{dtype_name(self.dtype)}{list(self.shape)}"
        finite = "no finite element" if self.low is None else f"finite from {self.low:.6g} to {self.high:.6g}"
        counts = f", {self.nans} NaN, {self.infs} Inf" if self.nans or self.infs else ""
        where = f", the first at {list(self.first)}" if self.first else ""
        return f"{what} {finite}{counts}{where}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def can_be_nonfinite(tensor: Tensor) -> bool:
    """An ordinary tensor of floating or complex numbers, with elements."""
    kind = tensor.is_floating_point() or tensor.is_complex()
    return kind and tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def nan_and_inf(tensor: Tensor) -> tuple[bool, bool]:
    """Whether there is a NaN, and an infinity. One pass over a tensor that is finite."""
    if not can_be_nonfinite(tensor):
        return False, False
    with torch.no_grad():
        values = tensor.detach()
        if bool(values.isfinite().all()):
            return False, False
        return bool(values.isnan().any()), bool(values.isinf().any())


def tensor_stats(tensor: Tensor) -> TensorStats:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.numel() == 0:
        return TensorStats(shape, dtype, None, None, 0, 0, None)
    with torch.no_grad():
        values = tensor.detach()
        finite, nan = values.isfinite(), values.isnan()
        real = (values.abs() if values.is_complex() else values)[finite].to(torch.float64)
        low = float(real.min()) if real.numel() else None
        high = float(real.max()) if real.numel() else None
        nans = int(nan.sum())
        infs = int((~finite).sum()) - nans
        first = tuple(int(place) for place in (~finite).nonzero()[0]) if nans or infs else None
    return TensorStats(shape, dtype, low, high, nans, infs, first)
