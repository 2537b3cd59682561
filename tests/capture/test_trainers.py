"""NaN capture in the trainers of Lightning, Hugging Face, espnet and accelerate: the real libraries, an infinity in one
batch of one rank, two and four ranks.
"""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpstats
from ddpstats import cli
from ddpstats._rerun.serialize import from_plain
from ddpstats.capture._bundle import Bundle
from ddpstats.testing import RankDied, RankPool, run_ranks
from tests.capture import trainer_runs as runs
from tests.capture.trainer_runs import Scenario, Trained
from tests.needs import needs

_IMPORTS = {"lightning": "lightning", "transformers": "transformers", "espnet": "espnet2", "accelerate": "accelerate"}

TRAINERS = list(_IMPORTS)
LIMIT_SEC = 120  # of ranks that import a trainer, on a loaded machine; without us, the other waits for half an hour
every_trainer = pytest.mark.parametrize("trainer", TRAINERS)

trainers_of_hooks = pytest.mark.parametrize("trainer", TRAINERS[:3])  # accelerate's loop is the user's own

FACTORIES = {"lightning": "lightning_net", "transformers": "net", "espnet": "espnet_net", "accelerate": "net"}
STEPS = {
    "lightning": "ddpstats.integrations.lightning:step",
    "transformers": "ddpstats.integrations.transformers:step",
    "espnet": "ddpstats.integrations.espnet:step",
    "accelerate": "tests.capture.trainer_runs:accelerate_step",
}


def trained(pool: RankPool, scenario: Scenario) -> list[Trained]:
    """The same parameters on every rank, in every bit, and finite; the same verdict and the same error."""
    needs(_IMPORTS[scenario.trainer])
    found: list[Trained] = pool.run(runs.train, scenario).values()
    assert bool(found[0].parameters.isfinite().all())
    for other in found[1:]:
        assert torch.equal(other.parameters, found[0].parameters)
        assert (other.verdict, other.error, other.error_ranks) == (
            found[0].verdict,
            found[0].error,
            found[0].error_ranks,
        )
    return found


def clean(pool: RankPool, trainer: str, **settings: Any) -> torch.Tensor:
    """Parameters after a run without capture."""
    (first, *_) = trained(pool, Scenario(trainer, **settings))
    assert (first.error, first.verdict) == (None, None)
    return first.parameters


def verdict_of(found: list[Trained]) -> ddpstats.Verdict:
    verdict = found[0].verdict
    assert verdict is not None
    return verdict


def bundle_of(found: list[Trained], culprit: int, index: int, micro_batch: int = -1) -> Bundle:
    """The bundle, which is whole and holds the bad batch of the culprit."""
    verdict = verdict_of(found)
    assert (verdict.kind, verdict.culprit_ranks) == ("nonfinite", (culprit,))
    assert set(verdict.by_rank) == {culprit}
    assert verdict.bundle is not None
    bundle = Bundle.open(verdict.bundle)
    assert bundle.manifest.complete
    assert bundle.manifest.ranks_present == tuple(range(len(found)))
    part = bundle.rank_part(culprit)
    batch = from_plain(part.micro_batches[micro_batch].batch)
    expected = runs.batch_of(culprit, index)
    expected["x"][2, 1] = torch.inf
    assert torch.equal(batch["x"], expected["x"])
    assert torch.equal(batch["y"], expected["y"])
    return bundle


def replayed(capsys: pytest.CaptureFixture[str], bundle: Bundle, factory: str, step: str) -> dict[str, Any]:
    """What ``ddpstats replay`` says: reproduced, bit for bit."""
    capsys.readouterr()
    model = f"tests.capture.trainer_runs:{factory}"
    status = cli.main(["replay", str(bundle.path), "--model", model, "--step", step, "--json"])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (status, told["reproduced"]) == (0, True)
    return told


EQUAL = {"losses": "equal", "norms": "equal", "gradients": "equal"}


# -- every trainer ----------------------------------------------------------------------------------------------------


@every_trainer
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_stop_names_the_rank_on_two_ranks_and_the_bundle_replays(
    two_ranks: RankPool, tmp_path: Path, trainer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = trained(two_ranks, Scenario(trainer, str(tmp_path), bad=(1, 1)))
    assert verdict_of(found).step == 1
    assert verdict_of(found).should_stop
    bundle = bundle_of(found, 1, 1)
    # one step was taken, the bad one was not, and none after it
    assert torch.equal(found[0].parameters, clean(two_ranks, trainer, steps=1))
    assert found[0].error_ranks == ((1,) if trainer == "espnet" else ())
    assert replayed(capsys, bundle, FACTORIES[trainer], STEPS[trainer])["bit_for_bit"] == EQUAL


@every_trainer
def test_stop_names_the_rank_on_four_ranks(four_ranks: RankPool, tmp_path: Path, trainer: str) -> None:
    found = trained(four_ranks, Scenario(trainer, str(tmp_path), bad=(2, 1)))
    bundle_of(found, 2, 1)
    assert torch.equal(found[0].parameters, clean(four_ranks, trainer, steps=1))


@every_trainer
def test_skip_goes_on(two_ranks: RankPool, tmp_path: Path, trainer: str) -> None:
    found = trained(two_ranks, Scenario(trainer, str(tmp_path), "skip", bad=(1, 1)))
    bundle_of(found, 1, 1)
    assert found[0].error is None
    assert not verdict_of(found).should_stop
    for fewer in (1, 3):
        assert not torch.equal(found[0].parameters, clean(two_ranks, trainer, steps=fewer))


@every_trainer
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_clean_run_is_the_same_in_every_bit(
    two_ranks: RankPool, tmp_path: Path, trainer: str, accumulate: int
) -> None:
    (found, _) = trained(two_ranks, Scenario(trainer, str(tmp_path), accumulate=accumulate))
    assert (found.verdict, found.error) == (None, None)
    assert torch.equal(found.parameters, clean(two_ranks, trainer, accumulate=accumulate))
    assert list(tmp_path.iterdir()) == []


@every_trainer
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_accumulated_gradients(
    two_ranks: RankPool, tmp_path: Path, trainer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of two micro-batches is the bad one: espnet reduces after it, the others do not."""
    found = trained(two_ranks, Scenario(trainer, str(tmp_path), bad=(1, 2), accumulate=2))
    bundle = bundle_of(found, 1, 2, micro_batch=0)
    assert verdict_of(found).step == 1
    assert [len(bundle.rank_part(rank).micro_batches) for rank in (0, 1)] == [2, 2]
    assert torch.equal(found[0].parameters, clean(two_ranks, trainer, steps=1, accumulate=2))
    steps = {
        **STEPS,
        "lightning": "tests.capture.trainer_runs:half_step",
        "accelerate": "tests.capture.trainer_runs:half_accelerate_step",
    }
    told = replayed(capsys, bundle, FACTORIES[trainer], steps[trainer])
    # After the first micro-batch espnet's gradients are the sum of all ranks', which one rank alone cannot have.
    compared = told["bit_for_bit"] if trainer != "espnet" else {**EQUAL, "losses": told["bit_for_bit"]["losses"]}
    assert compared == EQUAL


@trainers_of_hooks
def test_a_rank_that_raises_is_named_to_the_other(tmp_path: Path, trainer: str) -> None:
    started = time.monotonic()
    needs(_IMPORTS[trainer])
    first, second = run_ranks(runs.train, 2, Scenario(trainer, str(tmp_path), raises=(1, 1)), timeout_sec=LIMIT_SEC)
    assert isinstance(second.error, RankDied)
    said = first.value.error if first.ok else str(first.error)
    assert "rank 1 raised in step 1, micro-batch 0: ValueError: no such target" in said
    assert time.monotonic() - started < LIMIT_SEC + 20
    (bundle,) = map(Bundle.open, tmp_path.iterdir())
    assert (bundle.manifest.reason, bundle.manifest.culprit_ranks) == ("exception", (1,))
    assert from_plain(bundle.rank_part(1).micro_batches[-1].batch)["y"][0] == runs.RAISES


@pytest.mark.parametrize("trainer", TRAINERS[:2])
def test_a_step_that_is_left_out_does_nothing_but_is_counted(two_ranks: RankPool, tmp_path: Path, trainer: str) -> None:
    found = trained(two_ranks, Scenario(trainer, str(tmp_path), "skip", bad=(1, 0), steps=1))
    before = trained(two_ranks, Scenario(trainer, steps=0))
    assert torch.equal(found[0].parameters, before[0].parameters)
    assert found[0].counted == (1, 1)


# -- what one trainer has of its own ----------------------------------------------------------------------------------


def test_lightning_manual_optimization_with_two_optimizers(two_ranks: RankPool, tmp_path: Path) -> None:
    """Each optimizer's step is judged as one."""
    scenario = Scenario("lightning", str(tmp_path), bad=(1, 1), option="manual")
    found = trained(two_ranks, scenario)
    bundle_of(found, 1, 1)
    assert verdict_of(found).step in (2, 3)
    assert torch.equal(found[0].parameters, clean(two_ranks, "lightning", steps=1, option="manual"))
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


def test_lightning_batches_that_the_module_refuses(two_ranks: RankPool, tmp_path: Path) -> None:
    """Its on_train_batch_start returns -1 in the first epoch: that batch belongs to no step."""
    found = trained(two_ranks, Scenario("lightning", str(tmp_path), bad=(1, 0), option="refusing"))
    assert verdict_of(found).step == 0
    assert len(bundle_of(found, 1, 0).rank_part(1).micro_batches) == 1


@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_transformers_mixed_precision_replays(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """accelerate puts autocast inside of the module's forward; the bundle knows all the same."""
    found = trained(two_ranks, Scenario("transformers", str(tmp_path), bad=(1, 1), option="bf16"))
    bundle = bundle_of(found, 1, 1)
    told = replayed(capsys, bundle, "net", STEPS["transformers"])
    assert told["bit_for_bit"] == EQUAL
    autocast = bundle.rank_part(1).micro_batches[0].autocast
    assert autocast is not None
    assert autocast.enabled


@pytest.mark.parametrize("option", ["installed", "uneven"])
def test_espnet_beside_install_and_with_a_rank_out_of_batches(two_ranks: RankPool, tmp_path: Path, option: str) -> None:
    """A batch that the trainer drops because rank 1 has none left is in no step; `install` and `capture` together."""
    found = trained(two_ranks, Scenario("espnet", str(tmp_path / "bad"), "skip", bad=(0, 1), option=option))
    bundle_of(found, 0, 1)
    (same, _) = trained(two_ranks, Scenario("espnet", str(tmp_path / "clean"), option=option))
    assert torch.equal(same.parameters, clean(two_ranks, "espnet", option=option))


@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_transformers_tells_of_a_forward_pass_that_raises(tmp_path: Path) -> None:
    """Also outside of a ``with`` statement: no hook of the Trainer comes after that."""
    needs("transformers")
    ours: Any = importlib.import_module("ddpstats.integrations.transformers")
    model, bad = runs.net(), runs.batch_of(0, 0)
    bad["y"][0] = runs.RAISES
    stopper = ours.NaNCaptureCallback(tmp_path)
    stopper.on_train_begin(None, None, None, model=model, optimizer=None, lr_scheduler=None)
    try:
        with torch.no_grad(), pytest.raises(ValueError, match="no such target"):
            model(**bad)  # an evaluation: none of ours
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ValueError, match="no such target"):
            model(**bad)
        (bundle,) = map(Bundle.open, tmp_path.iterdir())
        assert bundle.manifest.reason == "exception"
        model(**runs.batch_of(0, 1))["loss"].backward()
    finally:
        stopper.on_train_end(None, None, None)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_espnet_with_another_loop_is_left_alone(two_ranks: RankPool, tmp_path: Path) -> None:
    needs("espnet2")
    for told, same in two_ranks.run(runs.espnet_with_another_loop, str(tmp_path)).values():
        assert same
        assert len(told) == 1
        assert "espnet 202511 has Trainer.train_one_epoch(model, batches) where " in told[0]


def test_espnet_with_continue_decides_as_always(two_ranks: RankPool, tmp_path: Path) -> None:
    scenario = Scenario("espnet", str(tmp_path / "continue"), "continue", bad=(1, 1))
    (went_on, _) = trained(two_ranks, scenario)
    (skipped, _) = trained(two_ranks, replace(scenario, dirpath=str(tmp_path / "skip"), policy="skip"))
    assert torch.equal(went_on.parameters, skipped.parameters)
    assert (went_on.error, verdict_of([went_on]).should_stop) == (None, False)


def test_espnet_is_left_alone_where_ddpstats_is_switched_off(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(runs.espnet_switched_off, str(tmp_path)).values() == [([], True)] * 2


def test_espnet_leaves_nothing_behind(two_ranks: RankPool, tmp_path: Path) -> None:
    needs("espnet2")
    assert two_ranks.run(runs.espnet_afterwards, str(tmp_path)).values() == [(True, True)] * 2
