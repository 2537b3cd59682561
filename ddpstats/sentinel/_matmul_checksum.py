"""Step 1 of the matmul checksum: rows of a product whose sum is not what the operands say."""

from __future__ import annotations

import torch
from torch import Tensor

from ddpstats.sentinel import _matmul_door as door
from ddpstats.sentinel._matmul_door import Product

# In units of rounding of the norm of a row of C: the checksum's own float32 sums; the rounding of C's elements,
# which only halves have beside that. Products of random numbers stay below 40 nearly always; to settle a row costs
# milliseconds, so lower limits would buy the next bits of the mantissa dearly.
_SUMS, _ELEMENTS = 40.0, 2.0
_MAGNITUDES = 12.0  # the same, of the magnitudes of A and B
_FEW_ROWS = 4  # cost less to settle than to look at again
_LARGEST_NORM = 1e19  # squares beyond that overflow in float32


def doubtful_rows(product: Product) -> Tensor | None:
    """Which rows of the result break the checksum: bool, the result's shape without its columns; None if none does."""
    result, left, right = product.result, product.left, product.right
    if result.numel() == 0:
        return None
    wide, noise = _NOISE[result.dtype]
    sums = right.sum(-1, dtype=wide)
    expected = _times(left.to(wide), sums)
    if product.alpha != 1:
        expected *= product.alpha
    if product.addend is not None:
        expected.add_(_row_sums(product.addend, result, wide), alpha=product.beta)
    off = result.sum(-1, dtype=wide).sub_(expected).abs_()
    norms = torch.linalg.vector_norm(result, 2, -1, dtype=wide).clamp_(max=_LARGEST_NORM)
    excess = off.sub_(norms, alpha=noise)
    if excess.amax().item() <= 0:  # not so for NaN
        return None
    doubtful = ~(excess <= 0)
    if int(doubtful.sum()) <= _FEW_ROWS:
        return doubtful
    magnitudes = torch.linalg.vector_norm(right, 2, -1, dtype=wide).add_(sums.abs_())
    scale = _times(left.to(wide).abs(), magnitudes).mul_(abs(product.alpha)).clamp_(max=_LARGEST_NORM)
    doubtful = ~(excess <= scale.mul_(_MAGNITUDES * unit(wide) + operand_unit(result)))
    return doubtful if bool(doubtful.any()) else None


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return torch.mv(matrix, vector) if vector.dim() == 1 else torch.bmm(matrix, vector.unsqueeze(-1)).squeeze(-1)


def _row_sums(addend: Tensor, result: Tensor, wide: torch.dtype) -> Tensor:
    if addend.dim() == 1 and len(addend) == result.shape[-1]:
        return addend.sum(dtype=wide)  # a bias: the same for every row
    return addend.expand_as(result).sum(-1, dtype=wide)


def unit(dtype: torch.dtype) -> float:
    """The unit of rounding: the largest relative error of rounding a number to ``dtype``."""
    return torch.finfo(dtype).eps / 2


def _noise(dtype: torch.dtype) -> float:
    """How far the sum of a healthy row may be off, as a share of the row's norm."""
    noise = _SUMS * unit(wide_of(dtype))
    return noise + _ELEMENTS * unit(dtype) if dtype.itemsize == 2 else noise


_NOISE = {dtype: (wide_of(dtype), _noise(dtype)) for dtype in door.DTYPES}


def operand_unit(result: Tensor) -> float:
    """The same for what operands may be rounded to: users may allow float32 to be multiplied with fewer bits."""
    if result.dtype != torch.float32:
        return 0.0
    kind = torch.backends.cuda if result.is_cuda else torch.backends.mkldnn
    return _PRECISIONS.get(kind.matmul.fp32_precision, 2.0**-8)


_PRECISIONS = {"ieee": 0.0, "none": 0.0, "tf32": 2.0**-11}
