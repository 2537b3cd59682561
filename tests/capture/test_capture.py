"""NaNCapture on real ranks: who is named, what all ranks do about it, what is on the disk, and what stays as it was."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats import BundleError, ConfigError, NaNCapture, RankMissing, cli
from ddpstats._rerun.serialize import from_plain
from ddpstats.testing import RankPool, run_ranks
from tests.capabilities import shards_on_cpu
from tests.capture import capture_runs as runs
from tests.capture.capture_runs import Plan
from tests.threads import lasting_threads

NAN, INF = float("nan"), float("inf")
REPLAY = ["--model", "tests.capture.capture_runs:make_model", "--step", "tests.capture.capture_runs:noisy_step"]


def manifest_of(bundle: Path) -> dict[str, Any]:
    found = json.loads((bundle / "MANIFEST.json").read_text())
    assert isinstance(found, dict)
    return found


def batches_of(bundle: Path, rank: int) -> list[Any]:
    part = torch.load(bundle / f"rank{rank:05d}.pt", weights_only=True)
    return [from_plain(micro["batch"]) for micro in part["micro_batches"]]


def same_on_all(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The verdicts, which every rank must have in the same words."""
    first: list[dict[str, Any]] = outcomes[0]["verdicts"]
    assert all(one["verdicts"] == first for one in outcomes)
    return first


def assert_equal_replicas(outcomes: list[dict[str, Any]]) -> None:
    for one in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one["parameters"], outcomes[0]["parameters"], strict=True))
    assert all(bool(parameter.isfinite().all()) for parameter in outcomes[0]["parameters"])


@pytest.mark.parametrize("wrap", ["ddp", "view", "alone"])
@pytest.mark.parametrize("value", [NAN, INF], ids=["nan", "inf"])
def test_the_culprit_is_named_before_the_reduce(two_ranks: RankPool, tmp_path: Path, wrap: str, value: float) -> None:
    plan = Plan(str(tmp_path), wrap=wrap, plant={(1, 1, 0): value})
    outcomes = two_ranks.run(runs.train, plan).values()
    fine, bad = same_on_all(outcomes)
    assert fine["ok"]
    assert fine["message"] == ""
    assert (bad["kind"], bad["culprit_ranks"], bad["should_stop"], bad["should_skip"]) == (
        "nonfinite",
        (1,),
        True,
        True,
    )
    assert bad["parameters"][0].startswith("5.")
    assert "0.weight" in bad["parameters"]
    assert "3.bias" not in bad["parameters"]  # frozen
    assert bad["by_rank"] == {1: bad["parameters"]}
    assert "step 1: the gradients of rank 1 are not finite, before any reduction" in bad["message"]
    assert "The gradients of rank 0 were finite." in bad["message"]
    assert_equal_replicas(outcomes)
    manifest = manifest_of(bad["bundle"])
    assert "." in manifest["created_utc"]  # with the fraction of its second
    assert manifest["complete"]
    assert manifest["ranks_present"] == [0, 1]
    assert manifest["culprit_ranks"] == [1]
    assert manifest["model_files"] == {"0": "model.pt", "1": "model.pt"}
    batch = batches_of(bad["bundle"], 1)[0]
    assert torch.equal(batch["x"][1, 2], torch.tensor(value)) or batch["x"][1, 2].isnan()
    assert torch.equal(batch["y"], runs.batch_of(1, 1, 0)["y"])


def test_four_ranks_two_culprits(four_ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), plant={(2, 1, 0): NAN, (2, 3, 0): INF})
    outcomes = four_ranks.run(runs.train, plan).values()
    bad = same_on_all(outcomes)[2]
    assert bad["culprit_ranks"] == (1, 3)
    assert "rank 1: NaN in 5." in bad["message"]
    assert "The gradients of ranks 0, 2 were finite." in bad["message"]
    assert manifest_of(bad["bundle"])["ranks_present"] == [0, 1, 2, 3]
    assert_equal_replicas(outcomes)


def test_a_skipped_step_is_skipped_by_all(two_ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), steps=4, plant={(1, 0, 0): NAN}, options={"on_nonfinite": "skip"})
    outcomes = two_ranks.run(runs.train, plan).values()
    verdicts = same_on_all(outcomes)
    assert [verdict["ok"] for verdict in verdicts] == [True, False, True, True]
    assert (verdicts[1]["should_stop"], verdicts[1]["should_skip"]) == (False, True)
    assert_equal_replicas(outcomes)


def test_continue_leaves_the_step_to_the_caller_and_captures_once(two_ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), steps=4, plant={(1, 0, 0): NAN}, options={"on_nonfinite": "continue"})
    verdicts = same_on_all(two_ranks.run(runs.train, plan).values())
    assert [verdict["kind"] for verdict in verdicts] == ["ok", *["nonfinite"] * 3]
    assert not any(verdict["should_skip"] for verdict in verdicts)
    assert verdicts[1]["bundle"] is not None
    assert verdicts[2]["bundle"] is None
    assert "Not captured: the step before this one was." in verdicts[2]["message"]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("wrap", ["ddp", "view"])
def test_accumulation_names_the_micro_batch_and_is_replayed(two_ranks: RankPool, tmp_path: Path, wrap: str) -> None:
    plan = Plan(str(tmp_path), accumulate=3, wrap=wrap, plant={(1, 1, 1): NAN})
    outcomes = two_ranks.run(runs.train, plan).values()
    bad = same_on_all(outcomes)[1]
    assert bad["culprit_ranks"] == (1,)
    assert "first in micro-batch 1 of 3" in bad["message"]
    assert cli.main(["replay", str(bad["bundle"]), *REPLAY, "--json"]) == 0


def test_a_rank_without_a_batch_takes_part(two_ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), wrap="alone", plant={(1, 1, 0): NAN}, no_batch=(1, 0))
    bad = same_on_all(two_ranks.run(runs.train, plan).values())[1]
    assert bad["culprit_ranks"] == (1,)
    assert torch.load(bad["bundle"] / "rank00000.pt", weights_only=True)["micro_batches"] == []


def test_an_overflow_of_the_reduction_has_no_culprit(two_ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), wrap="fp16", plant={(1, 1, 0): 1e9}, into="y")
    bad = same_on_all(two_ranks.run(runs.train, plan).values())[1]
    assert (bad["kind"], bad["culprit_ranks"]) == ("overflow", ())
    assert "every rank's own gradients were finite" in bad["message"]
    assert "No rank is the culprit" in bad["message"]
    assert manifest_of(bad["bundle"])["reason"] == "overflow"


def test_gradients_that_differ_after_the_reduce_keep_the_ranks_in_lockstep(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.ignored_parameter, str(tmp_path)).values()
    assert first == second
    assert (first.kind, first.parameters) == ("overflow", ("5.bias",))
    assert "on rank 1: 5.bias" in first.message
    assert "memory of these ranks was damaged" in first.message


def test_a_loss_that_is_nan_while_gradients_are_finite_passes(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    with NaNCapture(tmp_path, model=model) as capture:
        with capture.micro_batch({"x": torch.ones(1, 2)}) as kept:
            loss = model(kept.batch["x"]).sum() + NAN
            kept.loss = loss
            loss.backward()
        assert capture.check().ok
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)
    assert list(tmp_path.iterdir()) == []


def test_a_scaler_that_skips_now_and_then_is_no_capture(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.scaled, str(tmp_path), 1e3, 8).values()
    assert first == second
    kinds = [verdict.kind for verdict in first]
    assert kinds[0] == "scaler_skip"
    assert kinds[-1] == "ok"
    assert set(kinds) == {"scaler_skip", "ok"}
    assert all(verdict.ok and not verdict.should_skip for verdict in first)
    assert list(tmp_path.iterdir()) == []


def test_a_scaler_that_skips_again_and_again_is_one(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.scaled, str(tmp_path), 1e30, 4, max_scaler_skips=3).values()
    assert first == second
    assert [verdict.kind for verdict in first] == ["scaler_skip", "scaler_skip", "scaler_skips", "scaler_skips"]
    assert first[2].culprit_ranks == (0, 1)
    assert first[2].bundle is not None
    assert first[2].should_stop
    assert "for the 3th time in a row" in first[2].message


@shards_on_cpu
def test_sharded_gradients_are_told_without_a_culprit(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.sharded, str(tmp_path)).values()
    assert first == second
    assert (first.kind, first.culprit_ranks) == ("nonfinite", ())
    assert "0.weight" in first.parameters
    assert "which rank they come from is not known" in first.message
    part = torch.load(first.bundle / "model.pt", weights_only=True)
    assert part["parameters"]["0.weight"].shape == (8, 6)


# -- nothing of the training changes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["ddp", "view"])
def test_parameters_and_random_numbers_are_those_of_a_run_without(
    two_ranks: RankPool, tmp_path: Path, wrap: str
) -> None:
    with_it = two_ranks.run(runs.train, Plan(str(tmp_path), wrap=wrap, accumulate=2)).values()
    without = two_ranks.run(runs.train, Plan(str(tmp_path), wrap=wrap, accumulate=2, captures=False)).values()
    for one, other in zip(with_it, without, strict=True):
        for what in ("parameters", "buffers"):
            assert all(torch.equal(a, b) for a, b in zip(one[what], other[what], strict=True))
        assert one["drawn"] == other["drawn"]
        assert one["threads"] == one["hooks"] == 0
    assert list(tmp_path.iterdir()) == []


def test_memory_is_one_batch_by_reference_and_the_buffers(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(64)
    with NaNCapture(tmp_path, model=model) as capture:
        batch = torch.randn(4, 64)
        alive = weakref.ref(batch)
        with capture.micro_batch({"x": batch}) as kept:
            assert kept.batch["x"] is batch
            model(batch).sum().backward()
        copies = capture._record.buffers
        assert copies is not None
        assert sum(one.nbytes for one in copies.values()) == sum(one.nbytes for one in model.buffers())
        assert capture._watch.arrivals[0].local() is None
        del batch, kept
        assert alive() is not None
        capture.check()
        assert alive() is None


def test_one_collective_a_step(two_ranks: RankPool, tmp_path: Path) -> None:
    for found in two_ranks.run(runs.cost_in_collectives, str(tmp_path)).values():
        assert found[1:] == [1, 1]


def test_reductions_go_on_beside_it(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(runs.stats_after_capture, str(tmp_path)).values() == [0.5, 0.5]


# -- bundles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["ddp", "view", "alone"])
def test_replay_is_bit_for_bit(
    two_ranks: RankPool, tmp_path: Path, wrap: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(str(tmp_path), wrap=wrap, plant={(2, 1, 0): NAN})
    bundle = same_on_all(two_ranks.run(runs.train, plan).values())[2]["bundle"]
    assert cli.main(["replay", str(bundle), *REPLAY, "--json"]) == 0
    culprit = json.loads(capsys.readouterr().out)
    assert (culprit["rank"], culprit["reproduced"]) == (1, True)
    assert culprit["losses"] == ["nan"]
    assert culprit["bit_for_bit"] == {"losses": "equal", "norms": "equal", "gradients": "equal"}
    # On the other rank all numbers are finite: equal norms say more there, and nothing is to be reproduced.
    assert cli.main(["replay", str(bundle), *REPLAY, "--rank", "0", "--json"]) == 1
    other = json.loads(capsys.readouterr().out)
    assert other["bit_for_bit"] | {"gradients": ""} == {"losses": "equal", "norms": "equal", "gradients": ""}


def test_old_bundles_go(two_ranks: RankPool, tmp_path: Path) -> None:
    plant = {(step, 1, 0): NAN for step in range(0, 8, 2)}
    plan = Plan(str(tmp_path), steps=8, plant=plant, options={"on_nonfinite": "skip", "keep": 2})
    verdicts = same_on_all(two_ranks.run(runs.train, plan).values())
    assert {path.name for path in tmp_path.iterdir()} == {verdicts[step]["bundle"].name for step in (4, 6)}


def test_a_bundle_has_a_limit(two_ranks: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_bytes": 36_000}
    plan = Plan(str(tmp_path), plant={(1, 1, 0): NAN}, options=options)
    bad = same_on_all(two_ranks.run(runs.train, plan).values())[1]
    assert bad["bundle"] is not None
    assert "max_bytes" in torch.load(bad["bundle"] / "model.pt", weights_only=True)["left_out"][0]
    options["max_bytes"] = 100
    small = same_on_all(two_ranks.run(runs.train, plan).values())[1]
    assert small["bundle"] is None
    assert "and max_bytes is 100" in small["message"]


def test_a_batch_that_is_changed_in_place(tmp_path: Path) -> None:
    first, second = runs.changed_batch(str(tmp_path))
    assert first[0] == ["batch['x']"]
    assert torch.equal(from_plain(first[1])["y"], torch.ones(2, 3))
    assert second[0] == []
    assert bool(from_plain(second[1])["x"].isnan().all())


def test_a_batch_that_cannot_be_stored(two_ranks: RankPool, tmp_path: Path) -> None:
    errors = [outcome.error for outcome in two_ranks.run(runs.odd_batch, str(tmp_path), True)]
    assert all(isinstance(error, BundleError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert "rank 1: batch['meta'][0]" in str(errors[0])
    assert "Odd" in str(errors[0])
    first, second = two_ranks.run(runs.odd_batch, str(tmp_path), False).values()
    assert first == second
    assert first[1].culprit_ranks == (1,)
    part = torch.load(first[1].bundle / "rank00001.pt", weights_only=True)
    assert part["micro_batches"][0]["batch_missing"] == "store_batch=False"


def test_a_full_disk_stops_the_run_and_leaves_the_last_good_bundle(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.full_disk, str(tmp_path)).values()
    assert first == second
    assert first[0].bundle is not None
    assert not first[0].should_stop
    assert manifest_of(first[0].bundle)["complete"]
    assert first[2].should_stop
    assert "The bundle is incomplete" in first[2].message
    assert "rank 1: OSError" in first[2].message
    manifest = manifest_of(first[2].bundle)
    assert not manifest["complete"]
    assert list(manifest["missing"]) == ["1"]
    assert manifest["ranks_present"] == [0]
    assert sorted(path.name for path in first[0].bundle.iterdir()) == [
        "MANIFEST.json",
        "model.pt",
        "rank00000.pt",
        "rank00001.pt",
    ]


def test_a_rank_that_dies_while_it_writes(tmp_path: Path) -> None:
    first, _ = run_ranks(runs.dies_while_writing, 2, str(tmp_path), timeout_sec=40)
    assert isinstance(first.error, RankMissing)
    assert first.error.missing_ranks == (1,)
    (bundle,) = tmp_path.iterdir()
    manifest = manifest_of(bundle)
    assert not manifest["complete"]
    assert manifest["missing"] == {"1": "did not write its part"}


# -- a rank that raises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ends", "in check"])
def test_a_rank_that_raises_stops_the_others_within_seconds(tmp_path: Path, how: str) -> None:
    first, second = run_ranks(runs.raises_in_forward, 2, str(tmp_path), how, timeout_sec=40)
    assert isinstance(first.error, RankMissing)
    assert first.error.missing_ranks == (1,)
    assert "rank 1 raised in step 1, micro-batch 0: ValueError: label 17 of 3" in str(first.error)
    assert second.exit_code == 7 if how == "ends" else isinstance(second.error, ValueError)
    (bundle,) = tmp_path.iterdir()
    assert str(bundle) in str(first.error)
    manifest = manifest_of(bundle)
    assert (manifest["reason"], manifest["ranks_present"], manifest["culprit_ranks"]) == ("exception", [1], [1])


def test_a_rank_that_raised_and_lives_on_does_not_hold_the_others(tmp_path: Path) -> None:
    first, _ = run_ranks(runs.raises_in_forward, 2, str(tmp_path), "lives on", timeout_sec=30)
    assert first.exit_code == 1  # long before rank 1 wakes up, not to speak of gloo's 30 minutes
    assert "rank 1 raised in step 1" in str(first.error)


# -- causes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "value", "cause"),
    [
        ("transient_step", 1.0, ["a race or a transient fault on rank 1", "finite in 2 of 2 runs"]),
        ("broken_device_step", 1.0, ["hardware of rank 1 (host ", "rank 0 gets finite ones"]),
        ("dividing_step", -1.0, ["software or data", "so does rank 0", "Not finite in float32 and float64 either"]),
        ("dividing_step", NAN, ["software or data", "The batch itself is not finite: batch['x'] of micro-batch 0"]),
        ("autocast_step", 1e6, ["software or data", "In float32 without autocast the gradients are finite"]),
        ("communicating_step", NAN, ["Cause not found", "step_fn communicates (all_reduce)"]),
    ],
)
def test_the_cause(two_ranks: RankPool, tmp_path: Path, step: str, value: float, cause: list[str]) -> None:
    first, second = two_ranks.run(runs.attributed, str(tmp_path), step, value).values()
    assert first["verdict"] == second["verdict"]
    assert first["untouched"]
    assert second["untouched"]
    assert all(part in first["verdict"].attribution for part in cause), first["verdict"].attribution
    assert first["verdict"].attribution in first["verdict"].message
    assert manifest_of(first["verdict"].bundle)["message"] == first["verdict"].message


# -- alone, and wrong arguments ---------------------------------------------------------------------------------------


def test_without_a_process_group(tmp_path: Path) -> None:
    before = lasting_threads()
    outcome = runs.train(Plan(str(tmp_path), wrap="alone", plant={(1, 0, 0): NAN}))
    assert [verdict["culprit_ranks"] for verdict in outcome["verdicts"]] == [(), (0,)]
    assert manifest_of(outcome["verdicts"][1]["bundle"])["world_size"] == 1
    assert lasting_threads() == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": None}, "model=NoneType: a torch.nn.Module is needed"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore' is not understood; legal values: stop, skip, continue"),
        ({"keep": 0}, "keep=0 must be a whole number, 1 or more"),
        ({"max_bytes": 1.5}, "max_bytes=1.5 must be a whole number"),
        ({"attribute": True}, "attribute=True needs step_fn="),
    ],
)
def test_arguments_that_cannot_work(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NaNCapture(tmp_path, **{"model": torch.nn.Linear(1, 1), **arguments})
    assert text in str(caught.value)


def test_ranks_with_other_settings(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = (outcome.error for outcome in two_ranks.run(runs.other_settings, str(tmp_path)))
    assert isinstance(first, ConfigError)
    assert str(first) == str(second)
    assert "  rank 0: on_nonfinite='stop', keep=1\n  rank 1: on_nonfinite='skip', keep=2" in str(first)


def test_a_rank_that_cannot_look_is_an_error_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.unreadable_gradient, str(tmp_path)).values()
    assert first == second
    assert first[0] == "InvalidStats"
    assert "rank 1" in first[1]
    assert "not this one" in first[1]
    assert first[2]


def test_calls_in_the_wrong_order(tmp_path: Path) -> None:
    capture = NaNCapture(tmp_path, model=torch.nn.Linear(1, 1))
    with capture.micro_batch(0), pytest.raises(ConfigError, match="inside another micro_batch"):
        capture.micro_batch(0).__enter__()
    with capture.micro_batch(0), pytest.raises(ConfigError, match="inside micro_batch"):
        capture.check()
    capture.close()
    capture.close()
    with pytest.raises(ConfigError, match="after close"):
        capture.check()
