"""Saved tensors are compared element by element, by msprobe's formulas; elements that differ are named as runs."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpstats.dump.analyze import tensors
from ddpstats.dump.analyze.tensors import Closeness, DifferingRuns, compare_tensors
from tests.dump.hand_made import forward, tensor, write_rank
from tests.dump.verbs import compare


@pytest.mark.parametrize("block_elements", [5, 1 << 20])
def test_closeness_is_what_the_formulas_give(block_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_BLOCK_ELEMENTS", block_elements)
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
    positions = [position for start, stop in close.runs.first for position in range(start, stop)]
    assert positions == (x != y).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("positions", "elements", "words"),
    [
        ([], 10, "all 10 elements are equal"),
        (
            range(100, 400),
            1000,
            "elements 100..399 of 1000 differ: contiguous, 300 elements = 1.172 KiB, which is what a buffer "
            "overwritten in memory looks like",
        ),
        (range(3, 6), 10, "elements 3..5 of 10 differ: contiguous, 3 elements = 12 bytes"),
        (range(10), 10, "all 10 elements differ: no block of memory stands out"),
        (
            range(0, 100, 3),
            100,
            "34 of 100 elements differ, in 34 runs, the largest of 1 element = 4 bytes (a power of two): 0..0, 3..3, "
            "6..6, 9..9, ...; scattered, as computed values are",
        ),
        (
            [*range(64), *range(128, 192)],
            512,
            "128 of 512 elements differ, in 2 runs, the largest of 64 elements = 256 bytes (a power of two): 0..63, "
            "128..191; a few contiguous blocks, as of overwritten memory",
        ),
    ],
)
def test_differing_elements_are_described_as_runs(positions: Iterable[int], elements: int, words: str) -> None:
    b = torch.zeros(elements)
    a = b.clone()
    a[list(positions)] = 1
    assert compare_tensors(a, b).runs.words == words


@pytest.mark.parametrize("block_elements", [5, 1 << 20])
def test_runs_are_counted_in_memory_order(block_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_BLOCK_ELEMENTS", block_elements)
    b = torch.zeros(8, 16).t()  # 16 x 8, its columns contiguous
    a = b.clone(memory_format=torch.preserve_format)
    a[:, 2] = 1
    assert compare_tensors(a, b, a.stride()).runs.first == ((32, 48),)
    assert compare_tensors(a.contiguous(), b.contiguous(), a.stride()).runs.first == ((32, 48),)
    assert compare_tensors(a, b).runs.count == 16


def test_run_in_a_view_with_gaps_is_not_called_overwritten_memory() -> None:
    b = torch.zeros(64, 8)[:, :4]
    a = torch.zeros(64, 8)[:, :4]
    a[:32] = 1
    words = compare_tensors(a, b, a.stride()).runs.words
    assert words == "elements 0..127 of 256 differ: in a row, in a view with gaps"
    a, b = a.contiguous(), b.contiguous()
    assert "overwritten" in compare_tensors(a, b, a.stride()).runs.words


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (torch.tensor([math.nan, 1.0, math.inf]), torch.tensor([math.nan, 1.0, math.inf]), True),
        (torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0]), False),
        (torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 1.0]), False),
        (torch.zeros(3), torch.ones(3), False),
        (torch.empty(0), torch.empty(0), True),
        (torch.tensor(2.0), torch.tensor(2.0), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 1j]), True),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3), True),
    ],
)
def test_special_values_are_accurate_only_where_equal(a: Tensor, b: Tensor, equal: bool) -> None:
    close = compare_tensors(a, b)
    assert (close.equal, close.accurate) == (equal, equal)


def test_whole_numbers_are_not_compared_as_floats() -> None:
    b = torch.tensor([1 << 60, 5, -1])
    a = torch.tensor([(1 << 60) + 1, 5, -1])
    assert compare_tensors(a, b).runs.first == ((0, 1),)
    assert compare_tensors(torch.tensor([1, 2], dtype=torch.int8), torch.tensor([1, 2])).equal
    unsigned = torch.tensor([-1]).view(torch.uint64)
    assert not compare_tensors(unsigned, torch.tensor([-1])).equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_flipped_bit_is_distinguished_from_another_value(dtype: torch.dtype) -> None:
    b = torch.ones(9, dtype=dtype)
    a = b.clone()
    a.view(torch.uint8)[-1] ^= 1 << 6
    words = compare_tensors(a, b).runs.words
    assert words == "element 8 of 9 differs: a single one, by a single bit"
    a[8] = 7  # it differs from 0 and 1 by one bit in no dtype
    assert compare_tensors(a, b).runs.words == "element 8 of 9 differs: a single one"


def test_list_of_runs_is_capped_and_their_numbers_are_not() -> None:
    b = torch.zeros(10_000)
    a = b.clone()
    a[::2] = 1
    runs = compare_tensors(a, b).runs
    assert (runs.count, runs.differing, runs.largest, len(runs.first)) == (5000, 5000, 1, 100)
    assert runs.first[:2] == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("cosine", "max_abs", "accurate"),
    [
        *((1.0, 0.0, True), (0.98, 0.0009, True), (0.98, 0.0011, False), (0.89, 0.0, False), (0.99, 1.0, True)),
        *((1.0, 1.01, False), (math.nan, 0.0, False), (1.0, math.nan, False)),
    ],
)
def test_tensor_is_accurate_by_cosine_and_largest_difference(cosine: float, max_abs: float, accurate: bool) -> None:
    close = Closeness(cosine, 0.0, max_abs, 0.0, 1.0, 1.0, DifferingRuns(1, 1, 1, 1, ((0, 1),), ""))
    assert close.accurate is accurate


def saved(path: Path, held: Tensor, task: str = "tensor", **more: Any) -> Path:
    entry = forward(tensor(1.0, 2.0, data_name="t.pt", **more))
    rank = write_rank(path / "step0/rank0", [("Torch.a.0.forward", entry)], task=task)
    (rank / "dump_tensor_data").mkdir()
    torch.save(held, rank / "dump_tensor_data" / "t.pt")
    return path


@pytest.mark.parametrize(
    ("entries", "compression", "reason"),
    [
        ({"file/data.pkl": b"\0" * 100_000}, zipfile.ZIP_DEFLATED, "unpacks to more than it holds"),
        ({"file/data.pkl": b"\0" * 2000}, zipfile.ZIP_STORED, "its data.pkl has 2,000 bytes, and at most 1,000"),
    ],
    ids=["packed", "pickle"],
)
def test_saved_tensor_that_would_take_memory_before_it_is_a_tensor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: dict[str, bytes], compression: int, reason: str
) -> None:
    a = saved(tmp_path, torch.ones(2))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    (a / "step0/rank0/dump_tensor_data/t.pt").write_bytes(content.getvalue())
    monkeypatch.setattr(tensors, "_MAX_PICKLE_BYTES", 1000)
    status, text = compare(a, a)
    assert (status, reason in text) == (2, True)


def test_part_of_a_sharded_tensor_is_compared_with_itself(tmp_path: Path) -> None:
    a = saved(tmp_path, torch.ones(2, 8), shape=[4, 8], placements=["Shard(dim=0)"], local_shape=[2, 8])
    status, text = compare(a, a)
    assert (status, "1 equal element by element" in text) == (0, True)


def test_equal_elements_are_equal_though_another_tool_rounded_the_statistics(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", torch.tensor([1, 2]), Mean=None, Norm=None, dtype="torch.int64")
    b = saved(tmp_path / "b", torch.tensor([1, 2]), Norm=2.236, dtype="torch.int64")
    for pair in ((a, b), (b, a)):
        status, text = compare(*pair, "--exact")
        assert (status, "1 equal element by element" in text) == (0, True)


def test_tensors_that_are_named_are_compared_by_their_elements_under_any_task(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", torch.tensor([1.0, 2.0]), task="statistics")
    b = saved(tmp_path / "b", torch.tensor([1.0, 2.5]), task="statistics")
    status, text = compare(a, b)
    assert (status, "1 equal in all their statistics" in text) == (0, True)
    status, text = compare(a, b, "--exact", "--tensor", "Torch.a.0.forward.input.0")
    assert (status, "element 1 of 2 differs" in text) == (1, True)
