"""The strategies draw what they say. That parts of one tree are never in conflict, `test_reduce_oracle` relies on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import find

from ddpstats.testing.strategies import leaf_values


@pytest.mark.parametrize("kind", [float, int, bool])
def test_plain_numbers_are_drawn(kind: type) -> None:
    assert type(find(leaf_values(), lambda value: type(value) is kind)) is kind


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "one element"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float_tensors_are_drawn(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = find(
        leaf_values(), lambda value: isinstance(value, torch.Tensor) and (value.dtype, value.shape) == (dtype, shape)
    )
    assert tensor.dtype is dtype


def test_whole_tensors_are_drawn() -> None:
    tensor = find(leaf_values(), lambda value: isinstance(value, torch.Tensor) and value.dtype is torch.int64)
    assert tensor.shape == (1,)
