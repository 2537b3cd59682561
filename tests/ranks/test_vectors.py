"""Vectors of float64 become tensors with the bits that torch gives to Python numbers."""

from __future__ import annotations

import math
from array import array

import pytest
import torch

from ddpstats._ranks.vectors import as_tensor, elements, product

CPU = torch.device("cpu")
ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-7, 65519.9, 65520.0, 1e-40, 3.4028236e38, 1e300, 5e-324]
AS_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(AS_BITS[values.element_size()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [0, 1, 13, 255, 256, 1000])
def test_numbers_are_rounded_to_a_dtype_as_torch_rounds_them(dtype: torch.dtype, count: int) -> None:
    random = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(9).exp()
    numbers = array("d", (ODD + random.tolist())[:count])
    found = as_tensor(numbers, dtype, CPU)
    assert (found.dtype, found.shape) == (dtype, (count,))
    assert torch.equal(bits(found), bits(torch.tensor(numbers.tolist(), dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [5, 300])
def test_product_of_elements_and_a_weight_is_that_of_python_floats(dtype: torch.dtype, count: int) -> None:
    tensors = [torch.tensor([value], dtype=dtype) for value in (ODD + [i / 7 for i in range(count)])[:count]]
    found = product(elements(tensors), 3.3, count)
    assert repr(found.tolist()) == repr([tensor.item() * 3.3 for tensor in tensors])
