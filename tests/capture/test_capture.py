"""`NaNCapture` on real ranks gives every rank the same verdict, writes a bundle, and leaves the training as it was."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats import BundleError, ConfigError, NaNCapture, cli
from ddpstats._rerun.codec import from_plain
from ddpstats.capture import CaptureVerdict
from ddpstats.capture.bundle import Bundle
from ddpstats.capture.verdict import Report, find
from ddpstats.testing import RankPool, run_ranks
from tests import training
from tests.capabilities import shards_on_cpu
from tests.capture import capture_runs as runs, making
from tests.capture.capture_runs import Captured
from tests.threads import lasting_threads

NAN, INF = float("nan"), float("inf")
NAMES = ["--model", "tests.capture.capture_runs:make_model", "--step", "tests.capture.capture_runs:noisy_step"]
EXPLAINED_SEC = 2.0  # how soon a rank must learn that another one raised and ended
slow = pytest.mark.slow


def manifest_of(bundle: Path | None) -> dict[str, Any]:
    assert bundle is not None
    manifest = json.loads((bundle / "MANIFEST.json").read_text())
    assert isinstance(manifest, dict)
    return manifest


def part_of(bundle: Path | None, name: str) -> dict[str, Any]:
    assert bundle is not None
    return making.load(bundle / name)


def verdicts_of(runs_of_ranks: list[Captured]) -> list[CaptureVerdict]:
    """Return the verdicts, which every rank must have in the same words, with the same finite parameters."""
    first, *others = runs_of_ranks
    for run in others:
        assert run.verdicts == first.verdicts
        pairs = zip(run.trained.parameters, first.trained.parameters, strict=True)
        assert all(torch.equal(tensor, expected) for tensor, expected in pairs)
    assert all(bool(parameter.isfinite().all()) for parameter in first.trained.parameters)
    return first.verdicts


def same(verdicts: list[Any]) -> Any:
    """Return what all ranks have."""
    assert all(verdict == verdicts[0] for verdict in verdicts)
    return verdicts[0]


@pytest.mark.parametrize(
    ("wrap", "value"),
    [("ddp", NAN), pytest.param("view", INF, marks=slow), pytest.param("alone", NAN, marks=slow)],
)
def test_culprit_is_named_before_the_reduce_and_its_bundle_replays_bit_for_bit(
    two_ranks: RankPool, tmp_path: Path, wrap: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    fine, bad = verdicts_of(two_ranks.run(runs.trained, str(tmp_path), wrap, {(1, 1, 0): value}).values())
    assert fine.ok
    assert fine.message == ""
    assert (bad.kind, bad.culprit_ranks, bad.should_stop, bad.should_skip) == ("nonfinite", (1,), True, True)
    assert bad.parameters[0].startswith("5.")
    assert "0.weight" in bad.parameters
    assert "3.bias" not in bad.parameters  # frozen
    assert bad.by_rank == {1: bad.parameters}
    assert "step 1: the gradients of rank 1 are not finite, before any reduction" in bad.message
    assert "The gradients of rank 0 were finite." in bad.message
    manifest = manifest_of(bad.bundle)
    assert "." in manifest["created_utc"]  # with the fraction of its second
    assert manifest["complete"]
    assert (manifest["ranks_present"], manifest["culprit_ranks"]) == ([0, 1], [1])
    assert manifest["model_files"] == {"0": "model.safetensors", "1": "model.safetensors"}
    batch = from_plain(part_of(bad.bundle, "rank00001.safetensors")["micro_batches"][0]["batch"])
    assert str(batch["x"][1, 2].item()) == str(value)
    capsys.readouterr()
    assert cli.main(["replay", str(bad.bundle), *NAMES, "--json"]) == 0
    culprit = json.loads(capsys.readouterr().out)
    assert (culprit["rank"], culprit["reproduced"]) == (1, True)
    assert culprit["losses"] == ["nan"]
    assert culprit["bit_for_bit"] == {"losses": "equal", "norms": "equal", "gradients": "equal"}
    # On the other rank all numbers are finite: equal norms say more there, and nothing is to be reproduced.
    assert cli.main(["replay", str(bad.bundle), *NAMES, "--rank", "0", "--json"]) == 1
    innocent = json.loads(capsys.readouterr().out)
    assert innocent["bit_for_bit"] | {"gradients": ""} == {"losses": "equal", "norms": "equal", "gradients": ""}


def test_two_culprits_of_three_ranks_are_both_named(three_ranks: RankPool, tmp_path: Path) -> None:
    plant = {(1, 0, 0): NAN, (1, 2, 0): INF}
    bad = verdicts_of(three_ranks.run(runs.trained, str(tmp_path), "ddp", plant).values())[1]
    assert bad.culprit_ranks == (0, 2)
    assert "rank 0: NaN in 5." in bad.message
    assert "The gradients of rank 1 were finite." in bad.message
    assert manifest_of(bad.bundle)["ranks_present"] == [0, 1, 2]


def test_continue_leaves_the_step_to_the_caller_and_captures_once(two_ranks: RankPool, tmp_path: Path) -> None:
    run = two_ranks.run(runs.trained, str(tmp_path), "ddp", {(1, 0, 0): NAN}, steps=3, on_nonfinite="continue")
    verdicts = same([outcome.verdicts for outcome in run.values()])
    assert [verdict.kind for verdict in verdicts] == ["ok", "nonfinite", "nonfinite"]
    assert not any(verdict.should_skip for verdict in verdicts)
    assert verdicts[1].bundle is not None
    assert verdicts[2].bundle is None
    assert "Not captured: the step before this one was." in verdicts[2].message
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("wrap", ["ddp", pytest.param("view", marks=slow)])
def test_accumulated_gradients_name_the_micro_batch_and_are_replayed(
    two_ranks: RankPool, tmp_path: Path, wrap: str
) -> None:
    run = two_ranks.run(runs.trained, str(tmp_path), wrap, {(1, 1, 1): NAN}, micro_batches=3)
    bad = verdicts_of(run.values())[1]
    assert bad.culprit_ranks == (1,)
    assert "first in micro-batch 1 of 3" in bad.message
    assert cli.main(["replay", str(bad.bundle), *NAMES, "--json"]) == 0


def test_a_rank_without_a_batch_takes_part(two_ranks: RankPool, tmp_path: Path) -> None:
    bad = same(two_ranks.run(runs.one_rank_without_a_batch, str(tmp_path)).values())
    assert bad.culprit_ranks == (1,)
    assert part_of(bad.bundle, "rank00000.safetensors")["micro_batches"] == []


def test_an_overflow_of_the_reduction_has_no_culprit(two_ranks: RankPool, tmp_path: Path) -> None:
    bad = verdicts_of(two_ranks.run(runs.trained, str(tmp_path), "fp16", {(1, 1, 0): 1e9}, "y").values())[1]
    assert (bad.kind, bad.culprit_ranks) == ("overflow", ())
    assert "every rank's own gradients were finite" in bad.message
    assert "No rank is the culprit" in bad.message
    assert manifest_of(bad.bundle)["reason"] == "overflow"


def test_gradients_that_differ_after_the_reduce_keep_the_ranks_in_lockstep(two_ranks: RankPool, tmp_path: Path) -> None:
    verdict = same(two_ranks.run(runs.ignored_parameter, str(tmp_path)).values())
    assert (verdict.kind, verdict.parameters) == ("overflow", ("5.bias",))
    assert "on rank 1: 5.bias" in verdict.message
    assert "memory of these ranks was damaged" in verdict.message


def test_a_loss_that_is_nan_while_gradients_are_finite_passes(tmp_path: Path) -> None:
    run = runs.captured(
        str(tmp_path), training.make_model(), 1, loss_of=lambda model, batch: training.loss_of(model, batch) + NAN
    )
    assert run.verdicts[0].ok
    assert list(tmp_path.iterdir()) == []


def test_a_scaler_that_skips_now_and_then_is_no_capture(two_ranks: RankPool, tmp_path: Path) -> None:
    verdicts = same(two_ranks.run(runs.scaled, str(tmp_path), 1e3, 8).values())
    kinds = [verdict.kind for verdict in verdicts]
    assert (kinds[0], kinds[-1], set(kinds)) == ("scaler_skip", "ok", {"scaler_skip", "ok"})
    assert all(verdict.ok and not verdict.should_skip for verdict in verdicts)
    assert list(tmp_path.iterdir()) == []


def test_a_scaler_that_skips_max_scaler_skips_times_is_captured(two_ranks: RankPool, tmp_path: Path) -> None:
    verdicts = same(two_ranks.run(runs.scaled, str(tmp_path), 1e30, 4, max_scaler_skips=3).values())
    assert [verdict.kind for verdict in verdicts] == ["scaler_skip", "scaler_skip", "scaler_skips", "scaler_skips"]
    assert verdicts[2].culprit_ranks == (0, 1)
    assert verdicts[2].bundle is not None
    assert verdicts[2].should_stop
    assert "GradScaler skips the step, 3 times in a row" in verdicts[2].message


@pytest.mark.parametrize("sees_local", [True, False])
def test_a_scaler_that_skips_calls_no_gradients_finite_where_no_rank_is_the_culprit(sees_local: bool) -> None:
    report = Report(1, (), ("weight",), sees_local, 2.0**16, 0)
    verdict = find({0: report, 1: report}, 16, 16)
    assert (verdict.kind, verdict.culprit_ranks) == ("scaler_skips", ())
    assert "finite." not in verdict.message


@shards_on_cpu
def test_shards_are_nonfinite_without_a_culprit_and_are_written_by_their_owners(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = two_ranks.run(runs.sharded, str(tmp_path), attribute=True, step_fn=training.loss_of)
    captured = same(run.values())
    verdict = captured.verdict
    assert (verdict.kind, verdict.culprit_ranks, verdict.attribution) == ("nonfinite", (), None)
    assert "0.weight" in verdict.parameters
    assert "which rank they come from is not known" in verdict.message
    assert captured.gathered == 0
    part = part_of(captured.verdict.bundle, "model-rank00001.safetensors")
    assert part["parameters"]["0.weight"].shape == (4, 6)
    assert part["shards"]["0.weight"] == {"shape": [8, 6], "offsets": [4, 0]}
    parameters = Bundle.open(captured.verdict.bundle).parameters(1)
    assert {name: tensor.tolist() for name, tensor in parameters.items()} == captured.parameters
    names = ["--model", "tests.capture.capture_runs:plain_model", "--step", "tests.training:loss_of"]
    assert cli.main(["replay", str(captured.verdict.bundle), *names, "--rank", "1"]) == 0
    out = capsys.readouterr().out
    assert "reproduced: gradients of 4 of 4 parameters not finite\n  not finite then: not known\n" in out
    (tmp_path / captured.verdict.bundle.name / "model.safetensors").unlink()
    with pytest.raises(BundleError, match=r"model\.safetensors cannot be read"):
        Bundle.open(captured.verdict.bundle).parameters(1)


@shards_on_cpu
def test_a_rank_without_an_element_of_any_parameter_has_those_of_all(two_ranks: RankPool, tmp_path: Path) -> None:
    verdict = same(two_ranks.run(runs.sharded_row, str(tmp_path)).values())
    of_0, of_1 = (Bundle.open(verdict.bundle).parameters(rank) for rank in (0, 1))
    assert of_1["weight"].shape == (1, 6)
    assert of_1.keys() == of_0.keys()


def test_a_rank_that_ran_no_backward_pass_is_replayed_without_one(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = same(two_ranks.run(runs.backward_on_rank_0, str(tmp_path)).values())
    names = ["--model", "tests.capture.capture_runs:one_row", "--step", "tests.capture.capture_runs:sum_step"]
    assert cli.main(["replay", str(verdict.bundle), *names, "--rank", "0"]) == 0
    assert cli.main(["replay", str(verdict.bundle), *names, "--rank", "1"]) == 1
    assert (
        "not reproduced: gradients of 0 of 2 parameters not finite\n  not finite then: none\n"
        in capsys.readouterr().out
    )


def test_memory_is_one_batch_by_reference_and_the_buffers(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(64)
    with NaNCapture(tmp_path, model=model) as capture:
        batch = torch.randn(4, 64)
        alive = weakref.ref(batch)
        with capture.micro_batch({"x": batch}) as micro:
            assert micro.batch["x"] is batch
            model(batch).sum().backward()
        copies = capture._record.buffers
        assert copies is not None
        assert sum(copy.nbytes for copy in copies.values()) == sum(buffer.nbytes for buffer in model.buffers())
        assert capture._watch.arrivals[0].own_gradients() is None
        del batch, micro
        assert alive() is not None
        capture.check()
        assert alive() is None


def test_a_step_takes_one_collective(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(runs.collectives_of_a_step, str(tmp_path)).values() == [[1, 1], [1, 1]]


# -- bundles ----------------------------------------------------------------------------------------------------------


def test_skip_leaves_steps_out_on_all_ranks_and_the_newest_keep_bundles_stay(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    plant = {(step, 1, 0): NAN for step in (0, 2, 4)}
    run = two_ranks.run(runs.trained, str(tmp_path), "ddp", plant, steps=5, on_nonfinite="skip", keep=2)
    verdicts = verdicts_of(run.values())
    assert [verdict.ok for verdict in verdicts] == [False, True, False, True, False]
    assert all((verdict.should_stop, verdict.should_skip) == (False, not verdict.ok) for verdict in verdicts)
    assert sorted(tmp_path.iterdir()) == [verdict.bundle for verdict in verdicts[2::2]]


def test_a_bundle_larger_than_max_bytes_is_not_written(two_ranks: RankPool, tmp_path: Path) -> None:
    none = verdicts_of(two_ranks.run(runs.trained, str(tmp_path), "ddp", {(1, 1, 0): NAN}, max_bytes=100).values())[1]
    assert none.bundle is None
    assert "and max_bytes is 100" in none.message


def test_a_batch_that_is_changed_in_place_is_copied_from_then_on(tmp_path: Path) -> None:
    first, _, third = runs.changed_batch(str(tmp_path))
    micro_batch = part_of(first.bundle, "rank00000.safetensors")["micro_batches"][0]
    assert micro_batch["changed"] == ["batch['x']"]
    assert torch.equal(from_plain(micro_batch["batch"])["y"], torch.ones(2, 3))
    micro_batch = part_of(third.bundle, "rank00000.safetensors")["micro_batches"][0]
    assert micro_batch["changed"] == []
    assert bool(from_plain(micro_batch["batch"])["x"].isnan().all())


def test_a_batch_that_cannot_be_stored_is_an_error_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    errors = [outcome.error for outcome in two_ranks.run(runs.odd_batch, str(tmp_path), True)]
    assert all(isinstance(error, BundleError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert "rank 1: batch['meta'][0]" in str(errors[0])
    assert "Odd" in str(errors[0])
    verdicts = same(two_ranks.run(runs.odd_batch, str(tmp_path), False).values())
    assert verdicts[1].culprit_ranks == (1,)
    micro_batch = part_of(verdicts[1].bundle, "rank00001.safetensors")["micro_batches"][0]
    assert micro_batch["batch_missing"] == "store_batch=False"


def test_a_full_disk_stops_the_run_and_leaves_the_last_good_bundle(two_ranks: RankPool, tmp_path: Path) -> None:
    good, _, incomplete = same(two_ranks.run(runs.full_disk, str(tmp_path)).values())
    assert not good.should_stop
    assert manifest_of(good.bundle)["complete"]
    files = ["MANIFEST.json", "model.safetensors", "rank00000.safetensors", "rank00001.safetensors"]
    assert sorted(path.name for path in good.bundle.iterdir()) == files
    assert incomplete.should_stop
    assert "The bundle is incomplete" in incomplete.message
    assert "rank 1: OSError" in incomplete.message
    manifest = manifest_of(incomplete.bundle)
    assert not manifest["complete"]
    assert (list(manifest["missing"]), manifest["ranks_present"]) == (["1"], [0])


# -- a rank that raises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "count"), [("ends", 2), ("in check", 3)])
def test_a_rank_that_raises_stops_the_others_within_seconds(tmp_path: Path, how: str, count: int) -> None:
    first, second, *others = run_ranks(runs.raises_in_forward, count, str(tmp_path), how, timeout_sec=60)
    text, seconds = first.value
    assert all(outcome.value[0] == text for outcome in others)
    assert seconds < 2 * EXPLAINED_SEC + 5
    assert "rank 1 raised in step 1, micro-batch 0: ValueError: label 17 of 3" in text
    assert second.exit_code == 7 if how == "ends" else second.ok
    (bundle,) = tmp_path.iterdir()
    assert str(bundle) in text
    manifest = manifest_of(bundle)
    assert (manifest["reason"], manifest["ranks_present"], manifest["culprit_ranks"]) == ("exception", [1], [1])


# -- alone, and wrong arguments ---------------------------------------------------------------------------------------


def test_capture_works_without_a_process_group_and_leaves_no_thread(tmp_path: Path) -> None:
    before = lasting_threads()
    fine, bad = runs.trained(str(tmp_path), "alone", {(1, 0, 0): NAN}).verdicts
    assert (fine.culprit_ranks, bad.culprit_ranks) == ((), (0,))
    assert manifest_of(bad.bundle)["ranks"] == [0]
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
def test_an_argument_that_cannot_work_is_a_config_error(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NaNCapture(tmp_path, **{"model": torch.nn.Linear(1, 1), **arguments})
    assert text in str(caught.value)


def test_settings_that_differ_are_a_config_error_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = (outcome.error for outcome in two_ranks.run(runs.other_settings, str(tmp_path)))
    assert isinstance(first, ConfigError)
    assert str(first) == str(second)
    assert "  rank 0: on_nonfinite='stop', keep=1\n  rank 1: on_nonfinite='skip', keep=2" in str(first)


def test_calls_in_the_wrong_order_are_config_errors(tmp_path: Path) -> None:
    capture = NaNCapture(tmp_path, model=torch.nn.Linear(1, 1))
    with capture.micro_batch(0), pytest.raises(ConfigError, match="inside another micro_batch"):
        capture.micro_batch(0).__enter__()
    with capture.micro_batch(0), pytest.raises(ConfigError, match="inside micro_batch"):
        capture.check()
    capture.close()
    capture.close()
    with pytest.raises(ConfigError, match="after close"):
        capture.check()
