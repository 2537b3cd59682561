"""Bundles that ranks write: where, under which name, by which ranks, and what happens when one of them cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ddpstats import BundleError, NaNCapture, RankMissing, cli
from ddpstats.capture._bundle import Bundle, bundle_name
from ddpstats.capture._parts import PartSource
from ddpstats.capture._peers import Peers
from ddpstats.capture._publish import AloneBundle
from ddpstats.testing import RankPool, run_ranks
from tests.capture import making, publish_runs as runs, replay_models

REPLAY = ["--model", "tests.capture.capture_runs:make_model", "--step", "tests.capture.capture_runs:noisy_step"]
WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
BOOM = ValueError("boom")


def manifest_of(bundle: Path | None) -> dict[str, Any]:
    assert bundle is not None
    found = json.loads((bundle / "MANIFEST.json").read_text())
    assert isinstance(found, dict)
    return found


# -- a group that does not begin at rank 0 ----------------------------------------------------------------------------


def test_a_group_of_other_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    _, verdict = two_ranks.run(runs.subgroup, str(tmp_path)).values()
    manifest = manifest_of(verdict.bundle)
    assert (manifest["complete"], manifest["world_size"], manifest["ranks"]) == (True, 1, [1])
    assert (manifest["ranks_present"], manifest["culprit_ranks"]) == ([1], [1])
    assert manifest["model_files"] == {"1": "model.pt"}
    assert Bundle.open(verdict.bundle).rank_part(1).rank == 1
    assert cli.main(["replay", str(verdict.bundle), *REPLAY, "--json"]) == 0


def position_step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """NaN where the process has the second place of two."""
    second = (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (1, 2)
    loss: torch.Tensor = model(batch).mean()
    return loss * torch.nan if second else loss


def test_replay_stands_at_the_place_in_the_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    model = replay_models.small()
    batch = torch.ones(2, 4)
    part = making.run_and_keep(model, lambda m, b: m(b["x"]).mean() * torch.nan, [{"x": batch}], rank=5, world_size=2)
    part["micro_batches"][0]["batch"] = batch_plain(batch)
    bundle = making.write_bundle(tmp_path, {5: part}, making.parameters_of(model), ranks=(4, 5), culprits=[5])
    factory = "tests.capture.replay_models:small"
    step = "tests.capture.test_publish:position_step"
    assert cli.main(["replay", str(bundle), "--model", factory, "--step", step, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rank"] == 5


def batch_plain(batch: torch.Tensor) -> dict[str, Any]:
    return {"kind": "tensor", "data": batch, "accelerator": False, "requires_grad": False}


# -- the lowest rank cannot -------------------------------------------------------------------------------------------


def test_the_lowest_rank_cannot_look(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.lowest_cannot_look, str(tmp_path)).values()
    assert first == second
    assert first.should_stop
    assert "The bundle's manifest could not be written: PermissionError: [Errno 13]" in first.message


def test_the_lowest_rank_cannot_make_the_directory(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.lowest_cannot_make, str(tmp_path)).values()
    assert first == second
    assert first.bundle is None
    assert first.should_stop
    assert f"No bundle was written: rank 0 could not make a directory in {tmp_path}: PermissionError" in first.message
    assert "Give NaNCapture a directory that this rank may write to." in first.message
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "captures").write_text("")
    verdict = runs.bad_step(tmp_path / "captures", on_nonfinite="skip")
    assert verdict.bundle is None
    assert verdict.should_stop
    assert "could not make a directory" in verdict.message


def test_a_rank_dies_before_it_knows_the_directory(tmp_path: Path) -> None:
    first, _ = run_ranks(runs.dies_before_the_directory, 2, str(tmp_path), timeout_sec=40)
    assert isinstance(first.error, RankMissing)
    (bundle,) = tmp_path.iterdir()
    manifest = manifest_of(bundle)
    assert not manifest["complete"]
    assert manifest["ranks_present"] == [0]
    assert manifest["missing"] == {"1": "did not write its part"}


# -- names, and what is left out --------------------------------------------------------------------------------------


def test_a_name_that_is_taken(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.name_taken, str(tmp_path)).values()
    assert first == second
    assert first.bundle.name.endswith("-step00000000-2")
    assert manifest_of(first.bundle)["ranks_present"] == [0, 1]
    assert Bundle.open(tmp_path).path == first.bundle


def test_the_bundle_just_written_stays(tmp_path: Path) -> None:
    """Though all others have later names: the clock went back."""
    for place in range(3):
        torch.manual_seed(1)
        model = replay_models.small()
        part = making.run_and_keep(model, replay_models.mean_step, [{"x": torch.ones(2, 4)}])
        when = datetime.now(timezone.utc) + timedelta(days=1 + place)
        making.write_bundle(tmp_path, {0: part}, making.parameters_of(model), when=when)
    verdict = runs.bad_step(tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == [verdict.bundle]
    assert manifest_of(verdict.bundle)["complete"]


class Stateless:
    """As ZeroRedundancyOptimizer on the ranks that its state was not gathered on."""

    def state_dict(self) -> Any:
        raise TypeError("no state on this rank")


def test_a_state_that_cannot_be_had_is_left_out(tmp_path: Path) -> None:
    verdict = runs.bad_step(tmp_path, optimizer=Stateless(), scheduler=[Stateless()])
    assert manifest_of(verdict.bundle)["complete"]
    assert verdict.bundle is not None
    content = torch.load(verdict.bundle / "model.pt", weights_only=True)
    assert content["optimizer"] is None
    assert content["left_out"] == [
        "optimizer: TypeError: no state on this rank",
        "scheduler: TypeError: no state on this rank",
    ]


# -- a rank that raised -----------------------------------------------------------------------------------------------


@contextmanager
def source_of(dirpath: Path) -> Iterator[PartSource]:
    """Of a step that raised, in this process."""
    model = torch.nn.Linear(4, 1)
    with NaNCapture(dirpath, model=model, optimizer=torch.optim.Adam(model.parameters())) as capture:
        with capture.micro_batch(torch.ones(2, 4)):
            pass
        yield capture._source


def rank_1_of_2() -> Peers:
    return cast(Peers, SimpleNamespace(rank=1, ranks=(0, 1)))


def alone_path(dirpath: Path, step: int = 7, later_sec: int = 0) -> Path:
    return dirpath / bundle_name(step, WHEN + timedelta(seconds=later_sec), 1)


def test_all_ranks_raise_and_none_writes_over_another(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(runs.all_raise, str(tmp_path)).values()
    found = sorted(tmp_path.iterdir())
    assert [path.name[-10:] for path in found] == ["-rank00000", "-rank00001"]
    for rank, path in enumerate(found):
        manifest = manifest_of(path)
        assert (manifest["reason"], manifest["ranks_present"], manifest["ranks"]) == ("exception", [rank], [0, 1])
        assert manifest["missing"] == {str(1 - rank): f"this bundle is rank {rank}'s alone: it raised"}
        assert Bundle.open(path).model_part(rank)["left_out"] == []


def test_the_small_part_is_there_before_the_peers_are_told(tmp_path: Path) -> None:
    there: dict[Path | None, list[str]] = {}

    def announce(directory: Path | None) -> None:
        there[directory] = sorted(path.name for path in directory.iterdir()) if directory else []

    with source_of(tmp_path) as source:
        line = runs.publish_alone(alone_path(tmp_path), source, BOOM, 7, rank_1_of_2(), announce)
    assert there == {alone_path(tmp_path): ["rank00001.pt"]}
    assert line == f"ddpstats: the batch, the random state and the parameters of this step: {alone_path(tmp_path)}"
    assert Bundle.open(alone_path(tmp_path)).rank_part(1).error == "ValueError: boom"


def test_one_name_twice_is_two_bundles(tmp_path: Path) -> None:
    with source_of(tmp_path) as source:
        parts = [AloneBundle(alone_path(tmp_path), source, BOOM, 7, rank_1_of_2()) for _ in range(3)]
        for part in parts:
            part.write()
        for part in parts:
            part.finish()
    ends = [part.directory.name.rpartition("-rank")[2] for part in parts if part.directory is not None]
    assert ends == ["00001", "00001-2", "00001-3"]


def test_a_rank_keeps_so_many_of_its_own(tmp_path: Path) -> None:
    together = making.captured(tmp_path, replay_models.small, replay_models.mean_step, {"x": torch.ones(2, 4)})
    other = tmp_path / bundle_name(7, WHEN, 0)
    with source_of(tmp_path) as source:
        runs.publish_alone(other, source, BOOM, 7, cast(Peers, SimpleNamespace(rank=0, ranks=(0, 1))), keep=2)
        for second in range(5):
            runs.publish_alone(alone_path(tmp_path, later_sec=second), source, BOOM, 7, rank_1_of_2(), keep=2)
    mine = [alone_path(tmp_path, later_sec=second) for second in (3, 4)]
    assert set(tmp_path.iterdir()) == {together, other, *mine}


@pytest.mark.parametrize(
    ("max_bytes", "files", "said"),
    [
        (10, None, "could not be written: it would take 16416 bytes, and max_bytes is 10"),
        (16_420, ["MANIFEST.json", "rank00001.pt"], "left out: parameters: with them it would take 16436 bytes"),
        (16_436, ["MANIFEST.json", "model-rank00001.pt", "rank00001.pt"], "and the parameters of this step"),
    ],
)
def test_a_limit_holds_for_one_rank_too(tmp_path: Path, max_bytes: int, files: list[str] | None, said: str) -> None:
    with source_of(tmp_path) as source:
        line = runs.publish_alone(alone_path(tmp_path), source, BOOM, 7, rank_1_of_2(), max_bytes=max_bytes)
    assert said in line
    found = sorted(path.name for path in alone_path(tmp_path).iterdir()) if alone_path(tmp_path).exists() else None
    assert found == files


def test_parameters_that_cannot_be_written_leave_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with source_of(tmp_path) as source:
        part = AloneBundle(alone_path(tmp_path), source, BOOM, 7, rank_1_of_2())
        part.write()
        monkeypatch.setattr(source, "model_part", full)
        line = part.finish()
    assert "left out: parameters: OSError: [Errno 28] No space left on device" in line
    bundle = Bundle.open(alone_path(tmp_path))
    assert bundle.rank_part(1).error == "ValueError: boom"
    assert "OSError" in bundle.notes[0]


def test_a_part_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddpstats.capture._publish.write_part", full)
    told: list[Path | None] = []
    with source_of(tmp_path) as source:
        line = runs.publish_alone(alone_path(tmp_path), source, BOOM, 7, rank_1_of_2(), told.append)
    assert told == [None]
    assert "could not be written: OSError: [Errno 28]" in line
    assert list(tmp_path.iterdir()) == []


def test_sharded_parameters_are_not_gathered_by_one_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    _, line = two_ranks.run(runs.sharded_raise, str(tmp_path)).values()
    assert "left out: parameters: they are sharded, and one rank alone cannot gather them" in line
    (path,) = tmp_path.iterdir()
    assert manifest_of(path)["model_files"] == {}
    with pytest.raises(BundleError, match=r"no file with the parameters of rank 1 \(parameters: they are sharded"):
        Bundle.open(path).model_part(1)
    assert cli.main(["replay", str(path), *REPLAY]) == 2
