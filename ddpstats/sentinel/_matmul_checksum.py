"""The steps of the matmul checksum.

1. `doubtful_rows`: rows of a product in which a block of columns has a sum that the operands deny.
2. `faults_in`: those computed again in float64, what is wrong in them, and whether it is so each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpstats._base.text import dtype_name
from ddpstats._observe.torch_compat import in_backward
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
    return _PRECISIONS.get(_precision_of(torch.backends.cuda if result.is_cuda else torch.backends.mkldnn), 2.0**-8)


def _precision_of(backend: Any) -> str:
    try:
        return str(backend.matmul.fp32_precision)
    except AttributeError:  # older torch has one setting for all backends
        return {"highest": "ieee", "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bf16")


_PRECISIONS = {"ieee": 0.0, "none": 0.0, "tf32": 2.0**-11}


_BLOCK_ROWS = 256
_BLOCK_ELEMENTS = 1 << 22  # of B, in float64 at a time: 32 MiB

# What a healthy kernel stays below nearly always, in units of rounding of the sum of magnitudes.
_USUAL = 8.0


@dataclass(frozen=True)
class MatmulFault:
    """A row of a matrix product that healthy hardware does not compute.

    Attributes:
        op: "mm", "addmm", "bmm" or "baddbmm".
        shape: (m, k, n) of (m, k) @ (k, n).
        dtype: of the product, "float32", "bfloat16", ...
        index: the first wrong element of the row: (row, column), of bmm and baddbmm (batch, row, column).
        got: its value.
        expected: its value computed in float64.
        wrong: how many elements of the row are wrong.
        transient: the same kernel computed the element right when it was asked again; else the fault is sticky.
        backward: it happened in a backward pass.
    """

    op: str
    shape: tuple[int, int, int]
    dtype: str
    index: tuple[int, ...]
    got: float
    expected: float
    wrong: int
    transient: bool
    backward: bool


def faults_in(product: Product, doubtful: Tensor) -> Iterator[MatmulFault]:
    """The faulty rows among the ``doubtful`` ones (as of `doubtful_rows`), each computed again in float64."""
    repeated: list[Tensor] = []

    def again() -> Tensor:
        if not repeated:
            repeated.append(product.again())
        return repeated[0]

    most_rows = max(1, min(_BLOCK_ROWS, _BLOCK_ELEMENTS // product.result.shape[-1]))
    for batch, rows in _rows_by_batch(doubtful):
        for at in range(0, len(rows), most_rows):
            yield from _faults_of_block(product, batch, rows[at : at + most_rows], again)


def _rows_by_batch(doubtful: Tensor) -> Iterator[tuple[int | None, Tensor]]:
    if doubtful.dim() == 1:
        yield None, doubtful.nonzero().flatten()
        return
    for batch in doubtful.any(-1).nonzero().flatten().tolist():
        yield batch, doubtful[batch].nonzero().flatten()


@dataclass(frozen=True)
class _Judged:
    """A block of elements, each tensor of shape (rows, columns): the verdicts, and the values in float64."""

    wrong: Tensor
    transient: Tensor
    got: Tensor
    exact: Tensor


def _faults_of_block(
    product: Product, batch: int | None, rows: Tensor, again: Callable[[], Tensor]
) -> Iterator[MatmulFault]:
    k, n = product.right.shape[-2:]
    width = max(1, _BLOCK_ELEMENTS // max(k, 1))
    parts = [_judge(product, batch, rows, slice(at, at + width), again) for at in range(0, n, width)]
    wrong = torch.cat([part.wrong for part in parts], -1)
    for place in wrong.any(-1).nonzero().flatten().tolist():
        column = int(wrong[place].nonzero()[0])
        part, within = parts[column // width], (place, column % width)
        index = (int(rows[place]), column)
        yield MatmulFault(
            op=product.op,
            shape=(product.left.shape[-2], k, n),
            dtype=dtype_name(product.result.dtype),
            index=index if batch is None else (batch, *index),
            got=part.got[within].item(),
            expected=part.exact[within].item(),
            wrong=int(wrong[place].sum()),
            transient=bool(part.transient[within]),
            backward=in_backward(),
        )


def _judge(product: Product, batch: int | None, rows: Tensor, columns: slice, again: Callable[[], Tensor]) -> _Judged:
    def part_of(result: Tensor) -> Tensor:
        return (result if batch is None else result[batch])[rows, columns].double()

    left, right = (one if batch is None else one[batch] for one in (product.left, product.right))
    left, right = left[rows].double(), right[:, columns].double()
    multiplied = (left @ right) * product.alpha
    magnitude = (left.abs() @ right.abs()) * abs(product.alpha)
    exact = multiplied
    common = _common_error(product, multiplied, magnitude, left, right)
    if product.addend is not None:
        added = part_of(product.addend.expand_as(product.result)) * product.beta
        exact, magnitude = multiplied + added, magnitude + added.abs()
        common += unit(product.result.dtype) * (exact.abs() + 2 * added.abs())  # beta may be rounded, too
    got = part_of(product.result)
    return _verdicts(product, got, exact, magnitude, common, lambda: part_of(again()))


def _verdicts(
    product: Product, got: Tensor, exact: Tensor, magnitude: Tensor, common: Tensor, again: Callable[[], Tensor]
) -> _Judged:
    """Of each element. ``common``: an error that no order of summation changes, from rounding operands and results."""
    growth = product.left.shape[-1] + 4  # additions, each of which rounds a partial sum
    rounding = unit(wide_of(product.result.dtype)) * magnitude
    bound = growth * rounding + common
    error = _distance(got, exact)
    unusual = _can_be_judged(product, exact, magnitude) & (error > min(growth, _USUAL) * rounding + common)
    if not bool(unusual.any()):
        return _Judged(unusual, unusual, got, exact)
    repeated = again()
    changed, drift = repeated != got, _distance(repeated, exact)
    wrong = unusual & ((error > bound) | (changed & (4 * drift <= error)))
    return _Judged(wrong, changed & (drift <= bound), got, exact)


def _common_error(product: Product, multiplied: Tensor, magnitude: Tensor, left: Tensor, right: Tensor) -> Tensor:
    dtype = product.result.dtype
    roundings = 1 if product.alpha == 1 else 3  # before alpha, alpha itself, after it
    common = roundings * unit(dtype) * multiplied.abs() + 2 * operand_unit(product.result) * magnitude
    if dtype.itemsize == 2 and not product.result.is_cpu:
        common += 4 * unit(dtype) * magnitude  # torch lets such kernels add parts of the sum in half precision
    # Numbers below the normal range may be rounded coarsely, or taken for zero.
    operands = left.abs().sum(-1, keepdim=True) + right.abs().sum(0)
    factor = max(1.0, abs(product.alpha), abs(product.beta) if product.addend is not None else 0.0)
    common += factor * torch.finfo(wide_of(dtype)).tiny * (operands + left.shape[-1] + 2)
    return common + factor * torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def _can_be_judged(product: Product, exact: Tensor, magnitude: Tensor) -> Tensor:
    """False where an operand is not finite, which makes the magnitude so, or where the sum may have overflowed."""
    result = product.result
    summed_in = wide_of(result.dtype) if result.is_cpu else result.dtype
    fits = exact.abs() < 0.99 * torch.finfo(result.dtype).max
    before_alpha = max(1.0, 1 / abs(product.alpha))
    return fits & (magnitude * before_alpha < 0.5 * torch.finfo(summed_in).max)


def _distance(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
