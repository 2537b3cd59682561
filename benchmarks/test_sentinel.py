"""The sentinel's published rates hold over many seeds: no false alarm, and the share of flipped bits that is found."""

from __future__ import annotations

import pytest
import torch

from ddpstats import Sentinel
from ddpstats.sentinel.matmul import ChecksumWindow, doubtful_rows
from tests import training
from tests.sentinel import sentinel_runs
from tests.sentinel.products import DTYPES, faults_in_all_rows, faults_of, flip, numbers, product_of

SEEDS = 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5, 6), (64, 256, 64), (33, 1, 9), (5, 300, 1), (1, 40, 40)])
def test_clean_products_of_many_seeds_have_no_faults(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    for seed in range(SEEDS):
        left, right = numbers(m, k, seed=seed).to(dtype), numbers(k, n, seed=seed + 50).to(dtype)
        assert faults_of(product_of(left, right)) == []
        assert faults_of(product_of(left.abs(), right.abs())) == []
        assert faults_of(product_of(left.expand(2, m, k), right.expand(2, k, n))) == []


def test_kernels_that_give_other_last_bits_each_time_have_no_faults() -> None:
    for seed in range(SEEDS):
        left, right = numbers(8, 512, seed=seed), numbers(512, 8, seed=seed + 50)
        order = torch.randperm(512, generator=torch.Generator().manual_seed(seed))
        again = left[:, order] @ right[order]
        product = product_of(left, right)._replace(again=lambda again=again: again)  # type: ignore[misc]
        assert faults_in_all_rows(product) == []


@pytest.mark.parametrize(
    ("dtype", "first_bit", "least_share"), [(torch.float32, 23, 1.0), (torch.bfloat16, 7, 0.85)], ids=str
)
def test_flipped_signs_and_exponents_are_found_in_rows_of_thousands_of_columns(
    dtype: torch.dtype, first_bit: int, least_share: float
) -> None:
    product = product_of(numbers(4, 64).to(dtype), numbers(64, 8200, seed=1).to(dtype))
    assert doubtful_rows(product) is None
    generator = torch.Generator().manual_seed(5)
    found = []
    for bit in [*range(first_bit, 8 * dtype.itemsize)] * 6:
        element = int(torch.randint(product.result.numel(), (), generator=generator))
        flip(product.result, element, bit)
        rows = doubtful_rows(product)
        found.append(rows is not None and rows.nonzero().tolist() == [[element // 8200]])
        flip(product.result, element, bit)
    assert sum(found) >= least_share * len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_long_clean_run_raises_no_alarm(dtype: torch.dtype) -> None:
    model = sentinel_runs.wrapped("alone").to(dtype)
    with ChecksumWindow() as window, Sentinel(model, mode=2) as sentinel:
        training.train(
            model,
            40,
            batch_of=sentinel_runs.batch_of,
            loss_of=sentinel_runs.step_fn,
            hooks=training.Hooks(judge=lambda step: sentinel.step().ok),
        )
    assert window.checked > 1000
    assert (window.fault_count, window.problem) == (0, None)
