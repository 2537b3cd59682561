"""The docs' promises about devices hold, as the driver of the reference accelerator counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddpstats.testing import BitFlip, RankPool, run_ranks

from . import promise_runs as runs

pytestmark = pytest.mark.slow
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_adds_to_a_window_wait_for_nothing_and_its_flush_copies_nothing(refdev_rank: RankPool) -> None:
    adds, flush, mean = refdev_rank.run(runs.window_adds).values()[0]
    assert {"synchronizations", "host_reads"}.isdisjoint(adds)
    assert adds["copies_to_host"] == 5
    assert flush.get("host_reads", 0) == 0
    assert flush.get("copies_to_host", 0) == 0
    assert mean == 3.0


def test_a_reduction_copies_once_and_waits_once(refdev_rank: RankPool) -> None:
    for changes in refdev_rank.run(runs.reductions).values()[0]:
        assert changes["copies_to_host"] == 1
        assert changes["synchronizations"] == 1
        assert "host_reads" not in changes


def test_start_does_not_wait(refdev_rank: RankPool) -> None:
    assert refdev_rank.run(runs.reduction_is_started).values() == [2.0]


def test_adds_on_two_streams_are_both_counted(refdev_rank: RankPool) -> None:
    mean, weight = refdev_rank.run(runs.adds_on_two_streams).values()[0]
    assert mean == pytest.approx(2.0)
    assert weight == 4.0


def test_time_of_a_step_is_that_of_its_kernels(refdev_rank: RankPool) -> None:
    assert 0.4 < refdev_rank.run(runs.time_of_kernels).values()[0] < 30


@pytest.mark.parametrize(("what", "most"), [("capture", 1), ("sentinel", 1), ("guard", 0), ("all", 2)])
def test_waits_of_a_check(refdev_ranks: RankPool, tmp_path: Path, what: str, most: int) -> None:
    for waits in refdev_ranks.run(runs.waits_of_checks, str(tmp_path), what).values():
        assert max(waits[1:]) <= most, waits  # the first step agrees on settings


@pytest.mark.parametrize("copied_bytes", [0, 1 << 20])
def test_a_call_on_another_stream_is_dumped_after_it_has_run(refdev: None, tmp_path: Path, copied_bytes: int) -> None:
    values = run_ranks(runs.dumped_on_another_stream, 1, str(tmp_path), copied_bytes).values()
    assert values == [(7.0, 7.0)]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_an_overflow_is_the_scaler_s_and_a_nan_is_captured(
    refdev_ranks: RankPool, tmp_path: Path, dtype: torch.dtype
) -> None:
    expected = ["ok", "scaler_skip", "ok", "scaler_skip", "scaler_skips"]
    assert refdev_ranks.run(runs.overflow_and_nan, dtype, str(tmp_path)).values() == [expected] * 2


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(dtype, marks=pytest.mark.nightly) for dtype in DTYPES[1:])], ids=str
)
def test_the_sentinel_is_silent_in_right_steps_and_names_a_flipped_weight(
    refdev_ranks: RankPool, dtype: torch.dtype
) -> None:
    assert refdev_ranks.run(runs.alarms, "refdev", dtype, 40, []).values() == [[None] * 40] * 2
    flip = BitFlip("last.weight", "weight", 5, bit=0, step=2, rank=1)
    first, second = refdev_ranks.run(runs.alarms, "refdev", dtype, 4, [flip]).values()
    assert first == second
    assert first[:3] != [None] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_bit_of_a_weight_is_in_its_digest(refdev_rank: RankPool, dtype: torch.dtype) -> None:
    assert refdev_rank.run(runs.digests_of_one_bit, dtype).values() == [True]


def test_two_devices_in_one_process(refdev: None) -> None:
    reduced, mean = run_ranks(runs.two_devices, 1, env={"REFDEV_DEVICES": "2"}).values()[0]
    assert reduced == {"first": 2.0, "second": 3.0}
    assert mean == 3.0


def test_numbers_are_reduced_while_the_group_of_the_device_hangs(refdev_ranks: RankPool) -> None:
    assert refdev_ranks.run(runs.reduces_beside_a_device_that_hangs).values() == [{"loss": 0.5}] * 2
