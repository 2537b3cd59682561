"""NaN capture names the rank in the trainers of Lightning, Hugging Face, espnet and accelerate, and its bundle replays.

The libraries are the real ones, on two ranks; one batch of one rank holds an infinity.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpstats
from ddpstats import cli
from ddpstats._rerun.codec import from_plain
from ddpstats.capture.bundle import Bundle
from ddpstats.testing import RankDied, RankPool, run_ranks
from tests.capture import trainer_runs as runs
from tests.capture.trainer_runs import Scenario, Trained
from tests.needs import needs

pytestmark = [pytest.mark.library, pytest.mark.filterwarnings("ignore")]  # warnings of the libraries

_IMPORTS = {"lightning": "lightning", "transformers": "transformers", "espnet": "espnet2", "accelerate": "accelerate"}

TRAINERS = list(_IMPORTS)
LIMIT_SEC = 120  # of ranks that import a trainer, on a loaded machine


def only_nightly(trainers: list[str]) -> list[Any]:
    """Mark them: each of these ranks imports a library of many seconds."""
    return [pytest.param(trainer, marks=pytest.mark.nightly) for trainer in trainers]


every_trainer = pytest.mark.parametrize("trainer", TRAINERS)

FACTORIES = {"lightning": "lightning_net", "transformers": "Net", "espnet": "espnet_net", "accelerate": "Net"}
STEPS = {
    "lightning": "ddpstats.integrations.lightning:step",
    "transformers": "ddpstats.integrations.transformers:step",
    "espnet": "ddpstats.integrations.espnet:step",
    "accelerate": "tests.capture.trainer_runs:accelerate_step",
}
HALF_STEPS = {
    "lightning": "tests.capture.trainer_runs:half_step",
    "accelerate": "tests.capture.trainer_runs:half_accelerate_step",
}


def trained(pool: RankPool, scenario: Scenario) -> list[Trained]:
    """Return the runs: every rank has the same parameters to the bit, all finite, the same verdict and error."""
    needs(_IMPORTS[scenario.trainer])
    ranks: list[Trained] = pool.run(runs.train, scenario).values()
    assert bool(ranks[0].parameters.isfinite().all())
    for rank in ranks[1:]:
        assert torch.equal(rank.parameters, ranks[0].parameters)
        assert (rank.verdict, rank.error, rank.error_ranks) == (
            ranks[0].verdict,
            ranks[0].error,
            ranks[0].error_ranks,
        )
    return ranks


def clean(pool: RankPool, trainer: str, **settings: Any) -> torch.Tensor:
    """Return the parameters after a run without capture."""
    (first, *_) = trained(pool, Scenario(trainer, **settings))
    assert (first.error, first.verdict) == (None, None)
    return first.parameters


def verdict_of(ranks: list[Trained]) -> ddpstats.capture.CaptureVerdict:
    verdict = ranks[0].verdict
    assert verdict is not None
    return verdict


def bundle_of(ranks: list[Trained], culprit: int, index: int, micro_batch: int = -1) -> Bundle:
    """Return the bundle, which is whole and holds the bad batch of the culprit."""
    verdict = verdict_of(ranks)
    assert (verdict.kind, verdict.culprit_ranks) == ("nonfinite", (culprit,))
    assert set(verdict.by_rank) == {culprit}
    assert verdict.bundle is not None
    bundle = Bundle.open(verdict.bundle)
    assert bundle.manifest.complete
    assert bundle.manifest.ranks_present == tuple(range(len(ranks)))
    part = bundle.rank_part(culprit)
    batch = from_plain(part.micro_batches[micro_batch].batch)
    expected = runs.batch_of(culprit, index)
    expected["x"][2, 1] = torch.inf
    assert torch.equal(batch["x"], expected["x"])
    assert torch.equal(batch["y"], expected["y"])
    return bundle


def replayed(capsys: pytest.CaptureFixture[str], bundle: Bundle, factory: str, step: str) -> dict[str, Any]:
    """Return what ``ddpstats replay`` prints: reproduced, bit for bit."""
    capsys.readouterr()
    model = f"tests.capture.trainer_runs:{factory}"
    status = cli.main(["replay", str(bundle.path), "--model", model, "--step", step, "--json"])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (status, result["reproduced"]) == (0, True)
    return result


EQUAL = {"losses": "equal", "norms": "equal", "gradients": "equal"}


# -- every trainer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@every_trainer
def test_stop_names_the_rank_on_two_ranks_and_the_bundle_replays(
    two_ranks: RankPool, tmp_path: Path, trainer: str, accumulate: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first micro-batch of the second step is bad. Of two, espnet reduces after it, and the others do not."""
    ranks = trained(two_ranks, Scenario(trainer, str(tmp_path), bad=(1, accumulate), accumulate=accumulate))
    assert (verdict_of(ranks).step, verdict_of(ranks).should_stop) == (1, True)
    bundle = bundle_of(ranks, 1, accumulate, micro_batch=0)
    assert [len(bundle.rank_part(rank).micro_batches) for rank in (0, 1)] == [accumulate] * 2
    # one step was taken, the bad one was not, and none after it
    assert torch.equal(ranks[0].parameters, clean(two_ranks, trainer, steps=1, accumulate=accumulate))
    assert ranks[0].error_ranks == ((1,) if trainer == "espnet" else ())
    step = HALF_STEPS.get(trainer, STEPS[trainer]) if accumulate == 2 else STEPS[trainer]
    compared = replayed(capsys, bundle, FACTORIES[trainer], step)["bit_for_bit"]
    if (trainer, accumulate) == ("espnet", 2):
        # After the first micro-batch the gradients are the sum of all ranks', which one rank alone cannot have.
        compared = {**EQUAL, "losses": compared["losses"]}
    assert compared == EQUAL


@every_trainer
def test_skip_leaves_the_step_out_and_goes_on(two_ranks: RankPool, tmp_path: Path, trainer: str) -> None:
    ranks = trained(two_ranks, Scenario(trainer, str(tmp_path), "skip", bad=(1, 1)))
    bundle_of(ranks, 1, 1)
    assert ranks[0].error is None
    assert not verdict_of(ranks).should_stop
    for fewer in (1, 3):
        assert not torch.equal(ranks[0].parameters, clean(two_ranks, trainer, steps=fewer))


@every_trainer
def test_a_clean_run_is_the_same_in_every_bit(two_ranks: RankPool, tmp_path: Path, trainer: str) -> None:
    (first, _) = trained(two_ranks, Scenario(trainer, str(tmp_path), accumulate=2))
    assert (first.verdict, first.error) == (None, None)
    assert torch.equal(first.parameters, clean(two_ranks, trainer, accumulate=2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trainer", [TRAINERS[0], *only_nightly(TRAINERS[1:3])])  # accelerate's loop is the user's own
def test_a_rank_that_raises_is_named_to_the_other(tmp_path: Path, trainer: str) -> None:
    needs(_IMPORTS[trainer])
    scenario = Scenario(trainer, str(tmp_path), raises=(1, 1))
    first, second = run_ranks(runs.train, 2, scenario, timeout_sec=LIMIT_SEC)  # gloo alone waits for half an hour
    assert isinstance(second.error, RankDied)
    text = first.value.error if first.ok else str(first.error)
    assert "rank 1 raised in step 1, micro-batch 0: ValueError: no such target" in text
    (bundle,) = map(Bundle.open, tmp_path.iterdir())
    assert (bundle.manifest.reason, bundle.manifest.culprit_ranks) == ("exception", (1,))
    assert from_plain(bundle.rank_part(1).micro_batches[-1].batch)["y"][0] == runs.RAISES


@pytest.mark.parametrize("trainer", TRAINERS[:2])
def test_a_step_that_is_left_out_does_nothing_but_is_counted(two_ranks: RankPool, tmp_path: Path, trainer: str) -> None:
    ranks = trained(two_ranks, Scenario(trainer, str(tmp_path), "skip", bad=(1, 0), steps=1))
    before = trained(two_ranks, Scenario(trainer, steps=0))
    assert torch.equal(ranks[0].parameters, before[0].parameters)
    assert ranks[0].counted == (1, 1)


# -- what only one trainer has ----------------------------------------------------------------------------------------


def test_lightning_manual_optimization_with_two_optimizers(two_ranks: RankPool, tmp_path: Path) -> None:
    """Each optimizer's step is judged as one."""
    scenario = Scenario("lightning", str(tmp_path), bad=(1, 1), option="manual")
    ranks = trained(two_ranks, scenario)
    bundle_of(ranks, 1, 1)
    assert verdict_of(ranks).step == 2
    assert torch.equal(ranks[0].parameters, clean(two_ranks, "lightning", steps=1, option="manual"))
    (same, _) = trained(two_ranks, replace(scenario, bad=None))
    assert torch.equal(same.parameters, clean(two_ranks, "lightning", option="manual"))


def test_lightning_stops_after_its_min_steps(two_ranks: RankPool, tmp_path: Path) -> None:
    scenario = Scenario("lightning", str(tmp_path / "stop"), bad=(1, 1), option="min_steps")
    (stopped, _) = trained(two_ranks, scenario)
    (skipped, _) = trained(two_ranks, replace(scenario, dirpath=str(tmp_path / "skip"), policy="skip", option=""))
    assert stopped.verdict is not None
    assert stopped.verdict.should_stop
    assert torch.equal(stopped.parameters, skipped.parameters)
    assert stopped.counted[0] == 3


def test_transformers_mixed_precision_replays(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """accelerate puts autocast inside of the module's forward; the bundle knows all the same."""
    ranks = trained(two_ranks, Scenario("transformers", str(tmp_path), bad=(1, 1), option="bf16"))
    bundle = bundle_of(ranks, 1, 1)
    result = replayed(capsys, bundle, "Net", STEPS["transformers"])
    assert result["bit_for_bit"] == EQUAL
    autocast = bundle.rank_part(1).micro_batches[0].autocast
    assert autocast is not None
    assert autocast.enabled


@pytest.mark.parametrize("option", ["installed", "uneven"])
def test_espnet_beside_install_and_with_a_rank_out_of_batches(two_ranks: RankPool, tmp_path: Path, option: str) -> None:
    """A batch that the trainer drops because rank 1 has none left is in no step; `install` and `capture` together."""
    ranks = trained(two_ranks, Scenario("espnet", str(tmp_path / "bad"), "skip", bad=(0, 1), option=option))
    bundle_of(ranks, 0, 1)
    (same, _) = trained(two_ranks, Scenario("espnet", str(tmp_path / "clean"), option=option))
    assert torch.equal(same.parameters, clean(two_ranks, "espnet", option=option))


@pytest.mark.parametrize("is_off", [False, True], ids=["another loop", "DDPSTATS_DISABLE"])
def test_espnet_is_left_alone_with_another_loop_or_where_ddpstats_is_disabled(
    two_ranks: RankPool, tmp_path: Path, is_off: bool
) -> None:
    needs("espnet2")
    for warnings, is_unchanged in two_ranks.run(runs.espnet_left_alone, str(tmp_path), is_off).values():
        assert is_unchanged
        assert len(warnings) == (0 if is_off else 1)
        assert all("has Trainer.train_one_epoch(model, batches) where " in warning for warning in warnings)


def test_espnet_with_continue_decides_as_always(two_ranks: RankPool, tmp_path: Path) -> None:
    scenario = Scenario("espnet", str(tmp_path / "continue"), "continue", bad=(1, 1))
    (went_on, _) = trained(two_ranks, scenario)
    (skipped, _) = trained(two_ranks, replace(scenario, dirpath=str(tmp_path / "skip"), policy="skip"))
    assert torch.equal(went_on.parameters, skipped.parameters)
    assert (went_on.error, verdict_of([went_on]).should_stop) == (None, False)


def test_espnet_leaves_nothing_behind(two_ranks: RankPool, tmp_path: Path) -> None:
    needs("espnet2")
    assert two_ranks.run(runs.espnet_afterwards, str(tmp_path)).values() == [([True, True, False], True)] * 2
