"""``attribute=True`` says what caused a NaN: only where the rerun is of the step that was trained, and in time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats import RankMissing
from ddpstats.capture.bundle import Bundle
from ddpstats.testing import RankPool, run_ranks
from tests.capture import attribution_runs as runs

NAN = float("nan")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("trained", "step_fn", "value", "keeps_loss", "texts"),
    [
        ("transient", "transient", 1.0, True, ["a race or a transient fault on rank 1", "finite in 2 of 2 runs"]),
        (
            *("broken_device", "broken_device", 1.0, True),
            ["hardware of rank 1 (host ", "or something that only rank 1 holds outside", "rank 0 gets finite ones"],
        ),
        (
            *("dividing", "dividing", -1.0, True),
            ["software or data", "so does rank 0", "--rank 1 --precision fp32"],
        ),
        pytest.param(
            *("dividing", "dividing", NAN, True),
            ["software or data", "The batch itself is not finite: batch['x'] of micro-batch 0"],
            marks=slow,
        ),
        (
            *("in_float16", "in_float16", 1e6, True),
            ["software or data", "ddpstats replay "],
        ),
        ("without_room", "without_room", 1.0, True, ["hardware of rank 1 (host ", "rank 0 gets finite ones"]),
        ("communicating", "communicating", NAN, True, ["Cause not found", "step_fn communicates (all_reduce)"]),
        (
            *("with_bad_gradient", "another_loss", None, True),
            [
                *("Cause not found", "step_fn is not the step that was trained"),
                *("micro-batch 0: the loss was ", "Or a fault changed finite numbers, too"),
            ],
        ),
        pytest.param(
            *("tripled_with_bad_part", "plain", None, False),
            [
                *("Cause not found", "step_fn is not the step that was trained"),
                *("the gradient of 3.weight had norm ", ", and has "),
            ],
            marks=slow,
        ),
    ],
    ids=range(9),
)
def test_the_cause_is_named_and_reruns_leave_the_training_as_it_was(
    two_ranks: RankPool,
    tmp_path: Path,
    trained: str,
    step_fn: str,
    value: float | None,
    keeps_loss: bool,
    texts: list[str],
) -> None:
    run = two_ranks.run(runs.attributed, str(tmp_path), trained, step_fn, value, keeps_loss)
    (first, is_untouched), (second, is_untouched_there) = run.values()
    assert first == second
    assert is_untouched
    assert is_untouched_there
    assert first.attribution is not None
    assert all(text in first.attribution for text in texts), first.attribution
    assert ("Cause not found" in first.attribution) == (texts[0] == "Cause not found")
    assert first.attribution in first.message
    assert first.bundle is not None
    assert json.loads((first.bundle / "MANIFEST.json").read_text())["message"] == first.message


def test_dtypes_that_a_bundle_alone_holds_travel_to_the_peer(two_ranks: RankPool, tmp_path: Path) -> None:
    kinds = torch.uint16, torch.float8_e5m2
    first, second = two_ranks.run(runs.keeping, str(tmp_path), *kinds, -1.0).values()
    assert first == second
    assert first.culprit_ranks == (1,)
    assert "software or data" in first.attribution
    assert two_ranks.run(runs.keeping, str(tmp_path), *kinds, 1.0).values()[0].ok


@pytest.mark.parametrize("kind", [torch.float8_e4m3fnuz, "foreign"])
def test_what_cannot_travel_is_a_reason_beside_the_verdict(two_ranks: RankPool, tmp_path: Path, kind: Any) -> None:
    first, second = two_ranks.run(runs.keeping, str(tmp_path), None, kind, -1.0).values()
    assert first == second
    assert first.culprit_ranks == (1,)
    assert "Cause not found: rank 1 could not send the step: " in first.attribution
    assert ("float8_e4m3fnuz" if kind != "foreign" else "training.Foreign") in first.attribution
    assert "The bundle is incomplete" in first.message


def test_a_parameter_that_no_bundle_holds_is_named_beside_the_verdict(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.keeping, str(tmp_path), None, None, -1.0, True).values()
    assert first == second
    assert first.culprit_ranks == (1,)
    assert re.search(r"rank 0: TypeError: parameters\['.*'\] is of type tests.training.Foreign", first.message)
    assert "no other rank is known to have the same parameters" in first.attribution


def test_reruns_that_take_longer_than_the_timeout_cost_no_verdict(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.with_short_timeout, str(tmp_path), "slow").values()
    assert first == second
    assert (first.attribution or "").startswith("Cause: hardware of rank 1")


def test_a_culprit_that_dies_in_its_rerun_leaves_a_whole_bundle(tmp_path: Path) -> None:
    first, second = run_ranks(runs.attributed, 2, str(tmp_path), "dying", "dying", timeout_sec=40)
    assert second.exit_code == 9
    assert isinstance(first.error, RankMissing)
    assert first.error.missing_ranks == (1,)
    bundle = Bundle.open(tmp_path)
    assert bundle.manifest.complete
    assert bundle.manifest.culprit_ranks == (1,)
