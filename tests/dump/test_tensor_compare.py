"""Two tensors, element by element, in blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ddpstats.dump.compare import _tensor_compare
from ddpstats.dump.compare._tensor_compare import compare_tensors
from tests.dump.dumps import runs_of


@pytest.fixture(params=[5, 1 << 20], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensor_compare, "_BLOCK_ELEMENTS", request.param)


def test_against_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(7, 11, generator=generator)
    a = b * (1 + 0.004 * torch.rand(7, 11, generator=generator))
    close = compare_tensors(a, b)
    x, y = a.double().flatten(), b.double().flatten()
    relative = (x - y).abs() / y.abs()
    assert close.cosine == pytest.approx(torch.nn.functional.cosine_similarity(x, y, dim=0).item())
    assert close.euclidean == pytest.approx((x - y).norm().item())
    assert close.max_abs == (x - y).abs().max().item()
    assert close.max_relative == relative.max().item()
    assert close.one_thousandth == pytest.approx((relative < 0.001).double().mean().item())
    assert close.five_thousandths == pytest.approx((relative < 0.005).double().mean().item())
    assert close.runs == runs_of((x != y).nonzero().flatten().tolist(), 77, 4)


def test_a_block_that_was_written_over() -> None:
    b = torch.arange(3072, dtype=torch.float32)
    a = b.clone()
    a[:2048] = -1
    assert (
        compare_tensors(a, b).runs.describe().startswith("elements 0..2047 of 3072 differ: contiguous, 2,048 elements")
    )


def test_elements_are_counted_in_memory_order() -> None:
    b = torch.zeros(8, 16).t()  # 16 x 8, its columns contiguous
    a = b.clone(memory_format=torch.preserve_format)
    a[:, 2] = 1
    assert compare_tensors(a, b, a.stride()).runs.first == ((32, 48),)
    assert compare_tensors(a.contiguous(), b.contiguous(), a.stride()).runs.first == ((32, 48),)
    assert compare_tensors(a, b).runs.count == 16


def test_a_view_with_gaps_is_not_taken_for_a_block_of_memory() -> None:
    b = torch.zeros(64, 8)[:, :4]
    a = torch.zeros(64, 8)[:, :4]
    a[:32] = 1
    words = compare_tensors(a, b, a.stride()).runs.describe()
    assert words == "elements 0..127 of 256 differ: in a row, in a view with gaps"
    dense = compare_tensors(a, b, a.t().contiguous().t().stride()).runs
    assert dense.is_dense


@pytest.mark.parametrize(
    ("a", "b", "equal", "accurate"),
    [
        (torch.tensor([math.nan, 1.0, math.inf]), torch.tensor([math.nan, 1.0, math.inf]), True, True),
        (torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0]), False, False),
        (torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 1.0]), False, False),
        (torch.zeros(3), torch.zeros(3), True, True),
        (torch.zeros(3), torch.ones(3), False, False),
        (torch.empty(0), torch.empty(0), True, True),
        (torch.tensor(2.0), torch.tensor(2.0), True, True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False, False),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 1j]), True, True),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3), True, True),
    ],
)
def test_special_values(a: Tensor, b: Tensor, equal: bool, accurate: bool) -> None:
    close = compare_tensors(a, b)
    assert (close.equal, close.accurate) == (equal, accurate)


def test_whole_numbers_are_not_compared_as_floats() -> None:
    b = torch.tensor([1 << 60, 5, -1])
    a = torch.tensor([(1 << 60) + 1, 5, -1])
    assert compare_tensors(a, b).runs.first == ((0, 1),)
    assert compare_tensors(b, b.to(torch.int64)).equal
    assert compare_tensors(torch.tensor([1, 2], dtype=torch.int8), torch.tensor([1, 2])).equal
    unsigned = torch.tensor([-1]).view(torch.uint64)
    assert not compare_tensors(unsigned, torch.tensor([-1])).equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_a_flipped_bit_is_told_from_another_value(dtype: torch.dtype) -> None:
    b = torch.ones(9, dtype=dtype)
    a = b.clone()
    a.view(torch.uint8)[-1] ^= 1 << 6
    words = compare_tensors(a, b).runs.describe()
    assert words == "element 8 of 9 differs: a single one, by a single bit: a flipped one"
    a[8] = 7  # 0 and 1 are one bit apart from it in no dtype
    assert compare_tensors(a, b).runs.describe() == "element 8 of 9 differs: a single one"


def test_more_runs_than_are_kept() -> None:
    b = torch.zeros(10_000)
    a = b.clone()
    a[::2] = 1
    runs = compare_tensors(a, b).runs
    assert (runs.count, runs.differing, runs.largest) == (5000, 5000, 1)
    assert runs.first[:2] == ((0, 1), (2, 3))
