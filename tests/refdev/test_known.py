"""Faults that were expected on an accelerator, from reading, are named, and their legal twins are silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpstats import CollectiveMismatch
from ddpstats.testing import BitFlip, RankPool, run_ranks
from tests.programs import run

from . import known_runs as runs

pytestmark = pytest.mark.slow


# -- guard ------------------------------------------------------------------------------------------------------------


def test_an_aborted_communicator_is_a_rank_that_is_lost(refdev: None, tmp_path: Path) -> None:
    for what in ("capture", "strict"):
        text = run_ranks(runs.broken_group, 2, str(tmp_path), what)[0].value
        assert text.startswith("(1,)")
        assert "ValueError: no room on this device" in text
        assert text.endswith("because of NCCL communicator was aborted on rank 0.")


def test_timeouts_of_backends_that_say_theirs_and_of_one_that_does_not(refdev_ranks: RankPool) -> None:
    assert refdev_ranks.run(runs.timeouts).values() == [[40.0, 40.0, 40.0, 0.0]] * 2


def test_a_rank_that_is_late_is_named_while_another_waits_for_the_device(refdev: None) -> None:
    for text in run_ranks(runs.waits_for_a_late_rank, 2, 1.0, True).values():
        assert text.startswith("(1,) collective number 2 of the default group")


def test_a_kernel_may_take_longer_than_the_guard_s_timeout(refdev_ranks: RankPool) -> None:
    assert refdev_ranks.run(runs.waits_for_a_late_rank, 5.0, False).values() == ["", ""]


def test_a_rank_whose_device_does_not_end_is_named_in_time_on_all_ranks(refdev: None, tmp_path: Path) -> None:
    """The device works for two minutes; the limit of the test is less."""
    calls = ("reduce", "start", "window", "capture", "sentinel")
    missing = run_ranks(runs.judges_while_the_device_is_busy, 2, str(tmp_path), 5.0, timeout_sec=90).values()
    assert missing == [dict.fromkeys(calls, (0,))] * 2


def test_shapes_that_differ_are_named_on_both_ranks_before_the_device_ends_one(refdev: None) -> None:
    outcomes = run_ranks(runs.shapes_that_differ, 2, "step")
    for outcome in outcomes:
        assert isinstance(outcome.error, CollectiveMismatch) or outcome.exit_code == -6, outcome
        text = str(outcome.error)
        assert "rank 0: all_reduce(float32[3], sum)" in text
        assert "rank 1: all_reduce(float32[4], sum)" in text
        assert "What differs: the shape." in text


# -- capture ----------------------------------------------------------------------------------------------------------


def test_shards_without_elements_and_no_whole_model_in_memory(refdev_ranks: RankPool, tmp_path: Path) -> None:
    first, second = refdev_ranks.run(runs.sharded_steps, str(tmp_path)).values()
    assert (first["empty"], second["empty"]) == ([], ["5.weight", "5.bias"])
    right, bad = ("ok", True), ("nonfinite", False)
    for steps in (first, second):
        assert steps["kinds"] == [right, right, bad, right, right]
        assert steps["is_finite"]
        assert len(set(steps["held"])) == 1, steps["held"]
        assert max(steps["peaks"]) < steps["whole"] / 2


def test_a_rank_that_raises_where_no_other_waits_for_it_lives_on(refdev_ranks: RankPool, tmp_path: Path) -> None:
    assert refdev_ranks.run(runs.raises_and_lives_on, str(tmp_path), False).values() == [["ok", "ok"]] * 2
    assert len(list(tmp_path.iterdir())) == 1


def test_where_another_rank_waits_for_it_all_learn_what_it_raised(refdev: None, tmp_path: Path) -> None:
    environ = {"DDPSTATS_TIMEOUT_SEC": "8"}
    texts = run_ranks(runs.raises_and_lives_on, 2, str(tmp_path), True, env=environ).values()
    assert texts[0] == texts[1]
    assert len(texts[0]) == 1
    assert "rank 1 raised in step 0, micro-batch 1: ValueError: a sample that cannot be read" in texts[0][0]


@pytest.fixture(scope="module")
def bundle(refdev_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    dirpath = tmp_path_factory.mktemp("known")
    assert refdev_rank.run(runs.bundle_under_checkpointing, str(dirpath), False).values() == [""]
    path: str = refdev_rank.run(runs.bundle_under_checkpointing, str(dirpath)).values()[0]
    return path


@pytest.mark.parametrize("device", ["refdev", "cpu"])
def test_a_nan_under_reentrant_checkpointing_is_found_again_on_the_device_and_the_cpu(bundle: str, device: str) -> None:
    facts = _replayed(bundle, device)
    assert facts["reproduced"]
    assert facts["device"] == device
    assert facts["collectives"] == {"all_reduce": 1}
    origin = facts["bisect"]["origin"]
    assert (origin["module"], origin["autograd_node"], origin["direction"]) == ("root", "SqrtBackward0", "backward")
    if device == "refdev":  # with the dropout that the device drew
        assert (facts["bit_for_bit"]["losses"], facts["bit_for_bit"]["norms"]) == ("equal", "equal")
    else:
        assert any("captured on refdev:0, replayed on cpu" in note for note in facts["notes"])


def _replayed(bundle: str, device: str) -> Any:
    models = "tests.refdev.known_models"
    names = ["--model", f"{models}:make_checkpointed", "--step", f"{models}:reduced_loss", "--device", device]
    done = run(["-m", "ddpstats", "replay", bundle, *names, "--bisect", "--json"])
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


# -- sentinel, and what is run again ----------------------------------------------------------------------------------


def test_all_layers_of_the_sentinel_on_a_stream_that_is_behind(refdev_ranks: RankPool) -> None:
    for steps in refdev_ranks.run(runs.replayed_on_a_stream, []).values():
        assert steps["verdicts"] == [""] * 4
        assert len(set(steps["held"])) == 1, steps["held"]
    flip = BitFlip("last.weight", "weight", 5, bit=0, step=1, rank=1)
    first, second = (steps["verdicts"] for steps in refdev_ranks.run(runs.replayed_on_a_stream, [flip]).values())
    assert first == second
    assert first[0] == ""
    assert "replicas differ, first in parameter last.weight" in first[1]
    assert "[peer replay]" in first[1]


@pytest.mark.parametrize("detector", ["v2", "v3"])
def test_values_that_the_device_has_not_made_yet_are_waited_for(refdev_rank: RankPool, detector: str) -> None:
    on_time, behind = refdev_rank.run(runs.values_on_two_devices, detector).values()[0]
    assert len(on_time) == 8
    assert behind == on_time


def test_the_state_of_the_device_s_generator_is_kept_beside_the_cpu_s(refdev_rank: RankPool) -> None:
    assert refdev_rank.run(runs.random_state_of_the_device).values() == [[True] * 4]


@pytest.mark.parametrize(
    ("step", "texts"),
    [
        ("transient", ["a race or a transient fault on rank 1", "finite in 2 of 2 runs"]),
        ("broken_device", ["hardware of rank 1 (host ", "rank 0 gets finite ones"]),
    ],
)
def test_the_cause_of_a_nan_is_found_by_reruns_on_the_device(
    refdev_ranks: RankPool, tmp_path: Path, step: str, texts: list[str]
) -> None:
    for verdict, is_untouched, left_bytes in refdev_ranks.run(runs.attributed, str(tmp_path), step).values():
        assert all(text in verdict.attribution for text in texts), verdict.attribution
        assert is_untouched
        assert left_bytes < 100_000  # parameters take 2,000; caches of the library are small
