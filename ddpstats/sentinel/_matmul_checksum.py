"""Step 1 of the matmul checksum: rows of a product in which a block of columns has a sum that the operands deny."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddpstats.sentinel import _matmul_kernels as door
from ddpstats.sentinel._matmul_kernels import Product

# In units of rounding of the norm of a row of C: the checksum's own float32 sums; the rounding of C's elements,
# which only halves have beside that. Products of random numbers stay below 40 nearly always; to settle a row costs
# milliseconds, so lower limits would buy the next bits of the mantissa dearly.
_SUMS, _ELEMENTS = 40.0, 2.0
_MAGNITUDES = 12.0  # the same, of the magnitudes of A and B
_FEW_ROWS = 4  # cost less to settle than to look at again
# Of a row: a wrong element stands out less, the more columns are summed with it. Products of halves take so long that
# smaller blocks cost little beside them.
_COLUMNS, _COLUMNS_OF_HALVES = 1024, 256
_LARGEST_NORM = 1e19  # squares beyond that overflow in float32


def doubtful_rows(product: Product) -> Tensor | None:
    """Which rows of the result break the checksum: bool, the result's shape without its columns; None if none does."""
    result, left, right = product.result, product.left, product.right
    if result.numel() == 0:
        return None
    wide, noise = _NOISE[result.dtype]
    sums = _by_block(right, _sum, wide)
    expected = _times(left.to(wide), sums)
    if product.alpha != 1:
        expected *= product.alpha
    if product.addend is not None:
        expected.add_(_block_sums(product.addend, result, wide), alpha=product.beta)
    off = _by_block(result, _sum, wide).sub_(expected).abs_()
    norms = _by_block(result, _norm, wide).clamp_(max=_LARGEST_NORM)
    excess = off.sub_(norms, alpha=noise)
    if excess.amax().item() <= 0:  # not so for NaN
        return None
    doubtful = (~(excess <= 0)).any(-1)
    if int(doubtful.sum()) <= _FEW_ROWS:
        return doubtful
    magnitudes = _by_block(right, _norm, wide).add_(sums.abs_())
    scale = _times(left.to(wide).abs(), magnitudes).mul_(abs(product.alpha)).clamp_(max=_LARGEST_NORM)
    doubtful = (~(excess <= scale.mul_(_MAGNITUDES * unit(wide) + operand_unit(result)))).any(-1)
    return doubtful if bool(doubtful.any()) else None


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_block(matrix: Tensor, reduced: Callable[[Tensor, torch.dtype], Tensor], wide: torch.dtype) -> Tensor:
    """Each row's blocks of columns reduced: (..., rows, columns) -> (..., rows, blocks). The last may be smaller."""
    width = _COLUMNS_OF_HALVES if matrix.dtype.itemsize == 2 else _COLUMNS
    if matrix.shape[-1] <= width:
        return reduced(matrix, wide).unsqueeze(-1)
    # One by one: torch reduces a dimension between others several times as slowly.
    return torch.stack([reduced(block, wide) for block in torch.split(matrix, width, -1)], -1)


def _sum(matrix: Tensor, wide: torch.dtype) -> Tensor:
    return matrix.sum(-1, dtype=wide)


def _norm(matrix: Tensor, wide: torch.dtype) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(matrix, 2, -1, dtype=wide)
    return norm


def _times(matrix: Tensor, columns: Tensor) -> Tensor:
    if columns.shape[-1] == 1 and columns.dim() == 2:
        return torch.mv(matrix, columns.squeeze(-1)).unsqueeze(-1)
    return matrix @ columns


def _block_sums(addend: Tensor, result: Tensor, wide: torch.dtype) -> Tensor:
    if addend.dim() == 1 and len(addend) == result.shape[-1]:
        return _by_block(addend, _sum, wide)  # a bias: the same for every row
    return _by_block(addend.expand_as(result), _sum, wide)


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
