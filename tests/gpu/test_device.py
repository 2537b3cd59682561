"""Statistics, collectives and models on an accelerator are handled as on the CPU, and no step waits for the device.

What says something on a CPU runs there as well, so that it is known to be right before an accelerator runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats.testing import BitFlip
from tests.gpu import accelerator, device_runs as runs
from tests.gpu.conftest import Ranks
from tests.guard.tiers import tiers
from tests.interference.runs import WAYS, draws_from_torch
from tests.interference.test_interference import STEPS, assert_it_did_something
from tests.programs import run as program
from tests.reduction import reduce_pairs

pytestmark = pytest.mark.slow
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Run = Callable[..., Any]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["on the device", "one rank on the host"])
def test_stats_on_a_device(on_ranks: Run, device: str, dtype: torch.dtype, mixed: bool) -> None:
    expected = {"loss": 1.5, "count": 3.0, "host": 4.0, "largest": 0.5, "only": -1.5}
    for _ in range(2):  # new keys, and known ones
        assert on_ranks(runs.reduced, device, dtype, mixed) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_averages_stay_on_the_device(on_ranks: Run, device: str, dtype: torch.dtype) -> None:
    averages, total, where = on_ranks(runs.averaged, device, dtype)
    assert averages == {"a": (1.75, str(dtype), device), "b": (4.0, "torch.float32", device)}
    assert (total, where) == (8.0, device)


def test_one_copy_from_the_device_and_no_other_wait(gpu_that_reports_waits: str, on_ranks: Run) -> None:
    values, is_noticed, copies = on_ranks(runs.without_waiting, gpu_that_reports_waits)
    assert values == [float(i) for i in range(8)]
    assert is_noticed  # a wait, where there is one
    if copies is None:
        pytest.skip("no wait was found; torch's profiler sees nothing of the device here, so copies were not counted")
    assert copies == 1


def test_random_reductions_are_exact(ranks: Ranks, device: str) -> None:
    def run(seeds: range) -> Any:
        return ranks.of(device, 2).run(accelerator.run_joined, device, runs.reduced_as_drawn, device, seeds).values()

    reduce_pairs.check_many(run, 2, range(7000, 7030))


@pytest.mark.parametrize(
    "name",
    tiers(
        ["DDP"],
        [],
        [
            *("FSDP2", "autocast to bfloat16"),
            *("DDP with a bucket view and a communication hook", "DDP with unused parameters", "accumulation"),
            *("no_sync", "no DDP, gradients reduced by the program", "activation checkpointing, reentrant"),
            *("two models and two optimizers", "torch.compile of DDP", "tied parameters", "LBFGS with closures"),
        ],
    ),
)
def test_training_and_random_numbers_are_the_same_under_everything(
    ranks: Ranks, gpu: str, tmp_path: Path, name: str
) -> None:
    arguments = gpu, runs.trained_under_everything, gpu, name, STEPS, str(tmp_path)
    for comparison in ranks.of(gpu, 2).run(accelerator.run_joined, *arguments, timeout_sec=240).values():
        assert comparison.differences == {way: [] for way in WAYS}
        for did in comparison.did.values():
            assert_it_did_something(name, did)


def test_watcher_that_draws_on_the_device_is_seen(ranks: Ranks, gpu: str, tmp_path: Path) -> None:
    arguments = gpu, runs.trained_under_everything, gpu, "DDP", 1, str(tmp_path), draws_from_torch
    for comparison in ranks.of(gpu, 2).run(accelerator.run_joined, *arguments, timeout_sec=240).values():
        for differences in comparison.differences.values():
            assert any("random streams after" in text for text in differences), differences


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_products_are_not_accused_and_flipped_signs_are_found(
    on_rank: Run, device: str, dtype: torch.dtype, precision: str
) -> None:
    accused, caught = on_rank(runs.wrong_products, device, dtype, precision)
    assert accused == []
    assert caught == 60


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bundle_is_replayed(on_rank: Run, gpu: str, tmp_path: Path, dtype: torch.dtype) -> None:
    bundle = on_rank(runs.bundle_of_a_nan, gpu, dtype, str(tmp_path))
    names = ["--model", "tests.training:make_model", "--step", "tests.training:loss_of"]
    # The command knows no device that a program registers by itself.
    for replayed_on in ["cpu"] if gpu == "refdev" else [gpu, "cpu"]:
        done = program([*("-m", "ddpstats", "replay", bundle), *names, "--device", replayed_on])
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_guard_compares_collectives_of_tensors_on_a_device(on_ranks: Run, device: str, dtype: torch.dtype) -> None:
    value, seen, error = on_ranks(runs.guarded, device, dtype)
    assert value == [2.0] * 3
    assert seen == 2
    name = str(dtype).removeprefix("torch.")
    assert f"all_reduce({name}[3], sum)" in error
    assert f"all_reduce({name}[4], sum)" in error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_capture_under_autocast_with_a_grad_scaler(
    on_ranks: Run, device: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    steps, is_finite = on_ranks(runs.captured, device, dtype, str(tmp_path))
    assert [kind for kind, *_ in steps] == ["ok", "scaler_skips", "ok"]
    assert steps[1][1] == (1,)
    assert "rank00001.safetensors" in steps[1][2]
    assert is_finite  # the scaler left the step out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sentinel_is_silent_where_nothing_is_wrong(on_ranks: Run, device: str, dtype: torch.dtype) -> None:
    assert on_ranks(runs.watched, device, dtype, []) == ["", "", ""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sentinel_finds_a_flipped_bit(on_ranks: Run, device: str, dtype: torch.dtype) -> None:
    flip = BitFlip("last.weight", "weight", 5, bit=3, step=1, rank=1)
    alarms = on_ranks(runs.watched, device, dtype, [flip])
    assert alarms[0] == ""
    assert "last.weight" in alarms[-1]


def test_checks_in_one_call_wait_for_the_device_no_more_than_by_their_own(
    on_ranks: Run, device: str, tmp_path: Path
) -> None:
    apart = on_ranks(runs.judged, device, str(tmp_path), False)
    together = on_ranks(runs.judged, device, str(tmp_path), True)
    assert together == apart
    assert together[0] == [True] * 3
    assert device == "cpu" or not accelerator.reports_waits(device) or all(waits > 0 for waits in together[1])


def test_one_rank_with_the_backend_of_the_device(on_rank: Run, device: str, tmp_path: Path) -> None:
    assert on_rank(runs.alone, device, str(tmp_path)) == {
        "backend": "refccl" if device == "refdev" else accelerator.backend_of(device),
        "all_reduce": ([1.0, 1.0], 1),
        "stats": {"a": 2.0},
        "decision": True,
        "capture": ["ok", "ok", "ok"],
        "sentinel": ["", "", ""],
    }


def test_an_asynchronous_dump_does_not_wait_inside_the_step(
    on_rank: Run, gpu_that_reports_waits: str, tmp_path: Path
) -> None:
    assert on_rank(runs.dump_without_waiting, gpu_that_reports_waits, str(tmp_path))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_dump_has_the_numbers_of_the_host(on_rank: Run, device: str, tmp_path: Path, is_async: bool) -> None:
    expected, *_ = on_rank(runs.dumped, "cpu", str(tmp_path / "host"), is_async)
    means, streams, current = on_rank(runs.dumped, device, str(tmp_path / "device"), is_async)
    assert streams == {current}
    assert means.keys() == expected.keys()
    assert len(means) > 10
    for name in means:
        assert means[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4)
