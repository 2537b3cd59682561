"""Matrix products as the matmul checksum sees them, and the faults that it finds in them."""

from __future__ import annotations

import torch
from torch import Tensor

from ddpstats.sentinel.matmul import MatmulFault, Product, doubtful_rows, faults_in

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product_of(left: Tensor, right: Tensor) -> Product:
    op = "mm" if left.dim() == 2 else "bmm"
    return Product(op, left @ right, left, right, None, 1.0, 1.0, lambda: left @ right)


def faults_of(product: Product) -> list[MatmulFault]:
    rows = doubtful_rows(product)
    return [] if rows is None else list(faults_in(product, rows))


def faults_in_all_rows(product: Product) -> list[MatmulFault]:
    return list(faults_in(product, torch.ones(product.result.shape[:-1], dtype=torch.bool)))


def flip(result: Tensor, element: int, bit: int) -> None:
    bits = result.view(_INTS[result.dtype.itemsize]).flatten()
    width = 8 * result.dtype.itemsize
    bits[element] ^= -(1 << bit) if bit == width - 1 else 1 << bit
