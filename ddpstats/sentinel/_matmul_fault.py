"""Steps 2 and 3 of the matmul checksum: doubtful rows computed again in float64, and what is wrong in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpstats._base.wording import dtype_name
from ddpstats._observe.torch_compat import in_backward
from ddpstats.sentinel._matmul_checksum import operand_unit, unit, wide_of
from ddpstats.sentinel._matmul_kernels import Product

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
