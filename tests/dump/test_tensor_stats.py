"""Statistics of a tensor are those of its elements, in every dtype and memory layout, on the host and on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from ddpstats.dump.record import leaves
from ddpstats.dump.record.leaves import as_statistics, device_numbers, host_numbers, plain_values
from ddpstats.dump.writer import without_repeats


class Stats(NamedTuple):
    max: Any
    min: Any
    mean: Any
    norm: Any
    nan_count: int
    inf_count: int
    first_bad: list[int] | None


def stats_by(numbers: Callable[[Tensor, torch.Size], Sequence[float]], tensor: Tensor) -> Stats:
    held, repeats = without_repeats(tensor)
    written = as_statistics(numbers(held, tensor.shape), tensor.dtype, held.shape, repeats).values()
    values: list[Any] = [float(value) if isinstance(value, msgspec.Raw) else value for value in written]
    return Stats(*values)


def host_stats(tensor: Tensor) -> Stats:
    return stats_by(host_numbers, tensor)


def on_device(tensor: Tensor) -> Stats:
    return stats_by(lambda held, shape: device_numbers(held, shape).tolist(), tensor)


BOTH = pytest.mark.parametrize("stats", [host_stats, on_device])
Measure = Callable[[Tensor], Stats]


def reference(tensor: Tensor) -> tuple[float, float, float, float]:
    wide = tensor.to(torch.float64)
    return wide.max().item(), wide.min().item(), wide.mean().item(), wide.norm().item()


def base() -> Tensor:
    return torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1))


SHAPES = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "sliced": lambda x: x[:, 1:4],
    "expanded": lambda x: x[:, :1].expand(6, 5, 4),
    "expanded and transposed": lambda x: x[:, :1].expand(6, 5, 4).transpose(0, 2),
    "one row": lambda x: x[2],
    "a scalar, expanded": lambda x: x.sum().expand(7, 3),
    "with a dimension of one": lambda x: x.unsqueeze(1).transpose(0, 1),
}


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_do_not_depend_on_the_memory_layout(stats: Measure, shape: str) -> None:
    tensor = SHAPES[shape](base())
    measured = stats(tensor)
    assert measured[:4] == pytest.approx(reference(tensor), rel=1e-6)
    assert measured[4:] == (0, 0, None)


@BOTH
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.int8, torch.float8_e5m2]
)
def test_other_dtypes_are_measured_in_float32_or_better(stats: Measure, dtype: torch.dtype) -> None:
    tensor = (base().abs() * 9).to(dtype)
    assert stats(tensor)[:4] == pytest.approx(reference(tensor), rel=1e-6)


@BOTH
def test_norm_above_the_range_of_its_dtype_is_finite(stats: Measure) -> None:
    assert stats(torch.full((1_000_000,), 300.0, dtype=torch.float16)).norm == pytest.approx(300_000.0, rel=1e-5)
    large, small = stats(torch.full((9,), 1e30)), stats(torch.full((9,), 1e-30))
    assert large.norm == pytest.approx(3e30)
    assert small.norm == pytest.approx(3e-30)
    assert stats(torch.full((9,), 3e38)).mean == pytest.approx(3e38)
    assert stats(torch.full((99,), 3e38))[2:4] == pytest.approx((3e38, 3e38 * 99**0.5))


@BOTH
def test_bad_elements_are_counted_and_the_first_is_located(stats: Measure) -> None:
    tensor = base()
    tensor[1, 2, 3], tensor[4, 0, 0], tensor[5, 1, 1] = math.inf, math.nan, -math.inf
    measured = stats(tensor)
    assert (measured.nan_count, measured.inf_count, measured.first_bad) == (1, 2, [1, 2, 3])
    assert all(
        math.isnan(value) for value in (measured.max, measured.min, measured.mean, measured.norm) if value is not None
    )
    seen = stats(tensor.transpose(0, 2))
    assert seen.first_bad == [0, 0, 4]
    infinite = stats(torch.tensor([1.0, math.inf]))
    assert (infinite.max, infinite.min, infinite.mean, infinite.norm) == (math.inf, 1.0, math.inf, math.inf)


@BOTH
def test_booleans_scalars_and_complex_numbers(stats: Measure) -> None:
    assert stats(torch.arange(300).view(3, 100).t() > 3) == (True, False, None, None, 0, 0, None)
    assert stats(torch.tensor([True, False])) == (True, False, None, None, 0, 0, None)
    assert stats(torch.tensor(-2.5))[:4] == (-2.5, -2.5, -2.5, -2.5)
    assert stats(torch.tensor(7))[:4] == (7.0, 7.0, 7.0, 7.0)
    lone = stats(torch.tensor(math.nan))
    assert (lone.nan_count, lone.first_bad) == (1, [])
    assert stats(torch.tensor([3 + 4j, 0j])) == (5.0, 0.0, 2.5, None, 0, 0, None)
    assert stats(torch.zeros(4))[:4] == (0.0, 0.0, 0.0, 0.0)


def test_sparse_tensor_has_values_and_fake_tensor_none() -> None:
    from torch._subclasses import FakeTensorMode

    sparse = plain_values(torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse())
    assert sparse is not None
    assert sparse.tolist() == [2.0, 3.0]
    with FakeTensorMode():
        assert plain_values(torch.ones(2)) is None
    assert plain_values(torch._efficientzerotensor((3,))) is None  # zeros that are not stored


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_expanded_tensor_is_read_once(dtype: torch.dtype) -> None:
    """The whole tensor would be a million megabytes."""
    tensor = torch.ones(1, 64, 1, dtype=dtype).expand(1 << 14, 64, 1 << 20)
    held, repeats = without_repeats(tensor)
    assert (held.numel(), repeats) == (64, 1 << 34)
    for measured in (host_stats(tensor), on_device(tensor)):
        assert measured[:2] == (1, 1)
        assert measured.norm == (None if dtype is torch.bool else 2.0**20)


def test_expanded_mask_counts_every_infinity() -> None:
    mask = torch.full((1, 40, 40), -math.inf).triu(1).expand(1 << 30, 40, 40)
    measured = host_stats(mask)
    assert (measured.max, measured.min, measured.mean) == (0.0, -math.inf, -math.inf)
    assert (measured.nan_count, measured.inf_count, measured.first_bad) == (0, 780 << 30, [0, 0, 1])


@BOTH
def test_first_bad_element_is_found_at_any_index(stats: Measure) -> None:
    for index in (0, 1023, 1024, 9_000, 99_999):
        tensor = torch.zeros(100_000)
        tensor[index], tensor[-1] = -math.inf, math.nan
        measured = stats(tensor)
        assert (measured.nan_count, measured.inf_count, measured.first_bad) == (1, int(index != 99_999), [index])


@pytest.mark.parametrize(
    "limit", [leaves._FEW_ELEMENTS, leaves._ONE_PASS_ELEMENTS, leaves._CACHE_ELEMENTS * torch.get_num_threads()]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sizes_around_a_limit_have_the_same_statistics(limit: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(limit + 1, dtype=dtype, generator=torch.Generator().manual_seed(limit)) + 0.5
    for size in (limit - 1, limit, limit + 1):
        largest, smallest, *sums = reference(tensor[:size])
        assert host_stats(tensor[:size]) == (largest, smallest, *(pytest.approx(x, rel=1e-6) for x in sums), 0, 0, None)


@pytest.mark.parametrize("size", [49, 50, 51, 199, 200, 201, 449, 450, 451])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_element_counts_in_any_part(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "_ONE_PASS_ELEMENTS", 50)
    monkeypatch.setattr(leaves, "_CACHE_ELEMENTS", 200)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    random = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    for tensor in (random, random - 20, random + 20, torch.zeros(size, dtype=dtype)):
        for index in (0, 24, size - 2, size - 1, *range(49, size, 50)):
            values = tensor.clone()
            for value in (-0.0, 99.0, -99.0, math.nan, math.inf, -math.inf):
                values[index] = value
                measured, nans, infs = host_stats(values), int(math.isnan(value)), int(math.isinf(value))
                assert measured[:2] == pytest.approx(reference(values)[:2], rel=0, abs=0, nan_ok=True)
                assert measured[2:4] == pytest.approx(reference(values)[2:4], rel=1e-6, abs=1e-6, nan_ok=True)
                assert measured[4:] == (nans, infs, [index] if nans + infs else None)


@BOTH
def test_large_integers_and_magnitudes_are_exact(stats: Measure) -> None:
    assert stats(torch.tensor([2**24 + 1, 5])).max == 2**24 + 1
    large = torch.complex(torch.tensor([3e38] * 40), torch.tensor([3e38] * 40))
    for tensor in (large, large[:2], large[0]):
        measured = stats(tensor)
        assert measured.max == pytest.approx(3e38 * math.sqrt(2), rel=1e-6)
        assert (measured.inf_count, measured.first_bad) == (0, None)


@BOTH
def test_magnitude_that_overflows_is_not_counted_as_infinite(stats: Measure) -> None:
    values = torch.full((40,), 3e38 + 3e38j, dtype=torch.complex64)  # whose magnitudes float32 cannot hold
    values[3] = math.nan
    measured = stats(values)
    assert (measured.nan_count, measured.inf_count, measured.first_bad) == (1, 0, [3])


@pytest.mark.parametrize("size", [1e-310, 1e200])
def test_norm_of_float64_whose_squares_are_out_of_range_is_finite_on_the_host(size: float) -> None:
    assert host_stats(torch.full((100,), size, dtype=torch.float64)).norm == pytest.approx(10 * size)
