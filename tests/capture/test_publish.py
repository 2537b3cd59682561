"""Ranks write a bundle together, and the verdict says on all of them where one of them cannot."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ddpstats import BundleError, NaNCapture, RankMissing, cli
from ddpstats._ranks.calls import Channel
from ddpstats.capture import CaptureVerdict
from ddpstats.capture.bundle import Bundle, BundleWriter
from ddpstats.testing import RankPool, run_ranks
from tests.capabilities import shards_on_cpu
from tests.capture import making, publish_runs as runs, replay_models
from tests.capture.test_capture import NAMES, manifest_of

FULL = OSError(28, "No space left on device")


# -- a group that does not begin at rank 0 ----------------------------------------------------------------------------


def test_a_group_without_rank_0_writes_and_replays_a_bundle(two_ranks: RankPool, tmp_path: Path) -> None:
    _, verdict = two_ranks.run(runs.subgroup, str(tmp_path)).values()
    manifest = manifest_of(verdict.bundle)
    assert (manifest["complete"], manifest["ranks"]) == (True, [1])
    assert (manifest["ranks_present"], manifest["culprit_ranks"]) == ([1], [1])
    assert manifest["model_files"] == {"1": "model.safetensors"}
    assert Bundle.open(verdict.bundle).rank_part(1).rank == 1
    assert cli.main(["replay", str(verdict.bundle), *NAMES, "--json"]) == 0


# -- a rank that cannot write -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "policy", "text"),
    [
        ("look", "skip", "The bundle's manifest could not be written: PermissionError: [Errno 13]"),
        ("make", "continue", "No bundle was written: rank 0 could not make a directory in "),
    ],
)
def test_a_lowest_rank_without_permission_stops_all_ranks(
    two_ranks: RankPool, tmp_path: Path, what: str, policy: str, text: str
) -> None:
    first, second = two_ranks.run(runs.lowest_rank_cannot, str(tmp_path), what, on_nonfinite=policy).values()
    assert first == second
    assert first.should_stop
    assert text in first.message
    if what == "make":
        assert first.bundle is None
        assert "Give NaNCapture a directory that this rank may write to." in first.message
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("count", "dead"), [(2, 0), (2, 1), (3, 1)])
def test_a_rank_that_dies_while_it_writes_leaves_an_incomplete_bundle(tmp_path: Path, count: int, dead: int) -> None:
    """The lowest of the living ranks does not know what the others have written."""
    lowest, *others = [rank for rank in range(count) if rank != dead]
    survivor = run_ranks(runs.dies_while_writing, count, str(tmp_path), dead, timeout_sec=60)[lowest]
    assert isinstance(survivor.error, RankMissing)
    assert survivor.error.missing_ranks == (dead,)
    (bundle,) = tmp_path.iterdir()
    manifest = manifest_of(bundle)
    assert not manifest["complete"]
    assert manifest["ranks_present"] == [lowest]
    assert manifest["missing"][str(dead)] == "did not write its part"
    assert {manifest["missing"][str(rank)] for rank in others} <= {"not known: it could not say any more what it wrote"}


def test_a_rank_that_dies_before_it_writes_the_manifest_leaves_a_complete_bundle(tmp_path: Path) -> None:
    _, survivor = run_ranks(runs.dies_before_the_manifest, 2, str(tmp_path), timeout_sec=40)
    assert isinstance(survivor.error, RankMissing)
    (bundle,) = tmp_path.iterdir()
    manifest = manifest_of(bundle)
    assert (manifest["complete"], manifest["ranks_present"], manifest["culprit_ranks"]) == (True, [0, 1], [0, 1])


def test_a_disk_slower_than_the_timeout_costs_no_verdict(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.slow_disk, str(tmp_path)).values()
    assert first == second
    assert (first.kind, first.should_stop) == ("nonfinite", True)
    assert manifest_of(first.bundle)["complete"]


def test_a_disk_that_never_answers_costs_the_bundle_and_no_verdict(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.disk_that_never_answers, str(tmp_path)).values()
    assert first == second
    assert (first.kind, first.should_stop) == ("nonfinite", True)
    assert "rank 1: its part was not written within 2 s" in first.message
    assert not manifest_of(first.bundle)["complete"]


# -- names, and what is left out --------------------------------------------------------------------------------------


def test_the_bundle_just_written_stays_where_the_clock_went_back(tmp_path: Path) -> None:
    for day in range(3):
        when = datetime.now(timezone.utc) + timedelta(days=1 + day)
        making.captured(tmp_path, replay_models.Small, replay_models.mean_step, {"x": torch.ones(2, 4)}, when=when)
    verdict = runs.bad_step(tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == [verdict.bundle]
    assert manifest_of(verdict.bundle)["complete"]


# -- a rank that raised, and writes alone -----------------------------------------------------------------------------


def written_alone(dirpath: Path, monkeypatch: pytest.MonkeyPatch, fails: str = "", max_bytes: int | None = None) -> str:
    """Write the bundle of rank 1 of 2, which raised; ``fails``: what the disk has no room for.

    The disk has no room for parameters from the moment on in which the other ranks learn of the bundle.
    """

    def full(*_: object) -> None:
        raise FULL

    def announce(bundle: Path) -> None:
        assert bundle.is_dir()
        if fails == "parameters":
            monkeypatch.setattr(source, "model_part", full)

    with runs.source_of(dirpath, torch.nn.Linear(4, 1)) as (source, _):
        peers = cast(Channel, SimpleNamespace(rank=1, ranks=(0, 1)))
        finding = CaptureVerdict(7, culprit_ranks=(1,), message="rank 1 raised")
        writer = BundleWriter(dirpath, 3, max_bytes, None, peers, source, finding)
        if fails == "its part":
            monkeypatch.setattr("ddpstats.capture.bundle.write_part", full)
        return writer.write_alone(runs.BOOM, announce)


def test_the_other_ranks_can_learn_the_reason_before_anything_waits_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies that a bundle takes may wait behind a collective that never ends."""
    notes, first = list[str](), list[str]()

    def write_alone(*_: object) -> str:
        first.extend(notes)
        return ""

    monkeypatch.setattr(BundleWriter, "write_alone", write_alone)
    with NaNCapture(tmp_path, model=torch.nn.Linear(4, 1)) as capture:
        monkeypatch.setattr(capture._channel, "note", notes.append)
        with pytest.raises(ValueError, match="boom"), capture.micro_batch(torch.ones(1)):
            raise runs.BOOM
    assert first == ["rank 0 raised in step 0, micro-batch 0: ValueError: boom"]


@pytest.mark.parametrize(
    ("max_bytes", "files", "text"),
    [
        (19, [], "could not be written: it would take {all} bytes, and max_bytes is "),
        (20, [["MANIFEST.json", "model-rank00001.safetensors", "rank00001.safetensors"]], "the state of this step: "),
    ],
)
def test_max_bytes_holds_for_a_rank_that_writes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, files: list[list[str]], text: str
) -> None:
    """``max_bytes`` counts on from what the rank's own part takes; the parameters take 20 bytes."""
    with runs.source_of(tmp_path, torch.nn.Linear(4, 1)) as (source, _):
        part_bytes = source.sizes()["rank"]
    line = written_alone(tmp_path, monkeypatch, max_bytes=part_bytes + max_bytes)
    assert text.format(all=part_bytes + 20) in line
    assert [sorted(path.name for path in bundle.iterdir()) for bundle in tmp_path.iterdir()] == files


def test_a_disk_that_fills_up_leaves_the_part_without_parameters_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = written_alone(tmp_path, monkeypatch, "parameters")
    (directory,) = tmp_path.iterdir()
    assert directory.name.endswith("-step00000007-rank00001")
    assert "without parameters: OSError: [Errno 28] No space left on device" in line
    bundle = Bundle.open(directory)
    assert bundle.rank_part(1).error == "ValueError: boom"
    assert "OSError" in bundle.notes[0]
    line = written_alone(tmp_path, monkeypatch, "its part")
    assert "could not be written: OSError: [Errno 28]" in line
    assert list(tmp_path.iterdir()) == [directory]


@shards_on_cpu
def test_sharded_parameters_are_not_gathered_by_one_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    _, line = two_ranks.run(runs.sharded_raise, str(tmp_path)).values()
    assert "without parameters: they are sharded, and one rank alone cannot gather them" in line
    (path,) = tmp_path.iterdir()
    assert manifest_of(path)["model_files"] == {}
    with pytest.raises(BundleError, match="no parameters of rank 1: they are sharded"):
        Bundle.open(path).parameters(1)
    assert cli.main(["replay", str(path), *NAMES]) == 2
