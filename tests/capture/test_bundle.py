"""A bundle is read back as it was written, pruned when it is old, and refused when its files were damaged or forged."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats._rerun import codec
from ddpstats.capture.bundle import Bundle, ModelPart, close_bundle, write_part
from ddpstats.capture.manifest import (
    Manifest,
    Written,
    bundle_name,
    bundles_in,
    model_file,
    new_directory,
    prune,
    rank_file,
    read_manifest,
    write_manifest,
)
from ddpstats.errors import BundleError
from tests.capture import making
from tests.capture.replay_models import Small, Toy, mean_step

STEP = {"x": torch.ones(2, 4)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return making.captured(tmp_path, Toy, mean_step, STEP, STEP, rank=1, world_size=2)


def changed(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "MANIFEST.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def empty_bundle(dirpath: Path, number: int, complete: bool | None = True, rank: int | None = None) -> Path:
    """Make a bundle with a manifest and an empty file; ``complete=None``: without a manifest."""
    path = dirpath / bundle_name(number, making.WHEN + timedelta(seconds=number), rank)
    path.mkdir()
    (path / "rank00000.safetensors").write_bytes(b"")
    if complete is not None:
        write_manifest(path, manifest(complete=complete, step=number))
    return path


def manifest(**changes: Any) -> Manifest:
    plain = Manifest(
        reason="nonfinite", step=1, created_utc="", ranks=(0, 1), complete=True, culprit_ranks=(),
        parameters={}, message="", files={}, ranks_present=(), missing={}, model_files={}, notes=[], versions={},
    )  # fmt: skip
    return replace(plain, **changes)


# -- as it should be --------------------------------------------------------------------------------------------------


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    name = bundle_name(12, making.WHEN)
    made = [new_directory(tmp_path / "new", name) for _ in range(11)]
    assert [path.name for path in made] == [name, *(f"{name}-{number}" for number in range(2, 12))]
    assert [path for path, _ in bundles_in(tmp_path / "new")] == made
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        new_directory(tmp_path / "file", name)


def test_a_bundle_is_read_as_it_was_written(directory: Path) -> None:
    bundle = Bundle.open(directory)
    assert bundle.manifest.ranks_present == (1,)
    assert bundle.manifest.missing == {0: "it did not come"}
    part = bundle.rank_part(1)
    assert (part.rank, part.world_size, part.step, part.device, len(part.micro_batches)) == (1, 2, 12, "cpu", 2)
    assert part.micro_batches[0].norms is not None
    assert set(part.buffers) == {f"inner.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(bundle.parameters(0)) == set(part.parameter_names)
    assert bundle.notes == ()


def test_the_path_of_a_manifest_opens_its_bundle(directory: Path) -> None:
    assert Bundle.open(directory / "MANIFEST.json").path == directory
    with pytest.raises(BundleError, match="is not a directory"):
        Bundle.open(directory / "rank00001.safetensors")


def test_parameters_that_were_left_out_cannot_be_replayed(directory: Path) -> None:
    changed(directory, lambda m: m.update(model_files={}, notes=["they are sharded"]))
    with pytest.raises(BundleError, match=r"no parameters of rank 1: they are sharded\. There are those of rank: none"):
        Bundle.open(directory).parameters(1)
    changed(directory, lambda m: m.update(model_files={"0": "model.safetensors"}, complete=False))
    with pytest.raises(BundleError, match="There are those of rank: 0"):
        Bundle.open(directory).parameters(1)
    assert "they are sharded" in Bundle.open(directory).notes[0]


def test_a_directory_of_bundles_means_the_newest_complete_one(tmp_path: Path) -> None:
    for number, complete in enumerate([True, True, False, None]):
        empty_bundle(tmp_path, number, complete)
    bundle = Bundle.open(tmp_path)
    assert bundle.manifest.step == 1
    assert "holds 4 bundles; this is the newest complete one" in bundle.notes[0]


def test_an_incomplete_bundle_says_so_and_loads_what_is_there(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Small()
    part = making.run_and_keep(model, mean_step, [STEP], rank=1, world_size=2)
    directory = making.write_bundle(tmp_path, {1: part}, making.parameters_of(model), complete=False, culprits=[0])
    bundle = Bundle.open(directory)
    assert bundle.notes == ("the bundle is incomplete, what is there is used (rank 0: it did not come)",)
    assert bundle.rank_part(1).rank == 1
    with pytest.raises(BundleError, match="no part of rank 0: it did not come"):
        bundle.rank_part(0)


# -- bundles that are not ---------------------------------------------------------------------------------------------


def test_a_bundle_without_a_manifest_was_never_finished(directory: Path) -> None:
    (directory / "MANIFEST.json").unlink()
    with pytest.raises(BundleError, match=r"has no MANIFEST.json, which is written last: the writing never ended"):
        Bundle.open(directory)


def test_a_directory_without_a_bundle_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a bundle, and holds none"):
        Bundle.open(tmp_path)
    with pytest.raises(BundleError, match=r"is not there\. Give a bundle, .*, or the directory that NaNCapture"):
        Bundle.open(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="is not a directory"):
        Bundle.open(tmp_path / "file")
    empty_bundle(tmp_path, 1, complete=False)
    with pytest.raises(BundleError, match="holds no complete bundle; incomplete: capture-"):
        Bundle.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.update(format="zip"), "$.format"),
        (lambda m: m.update(version=3), "written by a newer ddpstats: format 3, this one reads 2; upgrade ddpstats"),
        (lambda m: m.update(version=True), "of format True, which is unknown"),
        (lambda m: m.pop("step"), "missing required field `step`"),
        (lambda m: m.update(ranks=[10**9]), "$.ranks[0]"),
        (lambda m: m.update(ranks=[], ranks_present=[], model_files={}), "$.ranks"),
        (lambda m: m.update(ranks_present=[0]), "ranks_present"),
        (lambda m: m.update(parameters={"01": []}), "$.parameters"),
        (lambda m: m["files"].update({"../../etc/passwd": {"bytes": 1, "sha256": "0" * 64}}), "not the name of a file"),
        (
            lambda m: m["files"].update({"rank00000.safetensors\n": {"bytes": 1, "sha256": "0" * 64}}),
            "not the name of a file",
        ),
        (lambda m: m["files"].update({"rank00000.safetensors": {"bytes": -1, "sha256": "0" * 64}}), "$.files"),
        (lambda m: m.update(model_files={"0": "../model.safetensors"}), "model_files"),
    ],
    ids=range(12),
)
def test_a_wrong_field_of_a_manifest_is_named(
    directory: Path, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    changed(directory, change)
    with pytest.raises(BundleError) as caught:
        Bundle.open(directory)
    assert text in str(caught.value)
    assert str(directory / "MANIFEST.json") in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe{}", b"[1, 2]", b"{", b'{"format": NaN}', b"[" * 200_000, b"null", b'{"step": 1, "step": 1}'],
    ids=["empty", "not UTF-8", "a list", "cut", "NaN", "deep", "null", "a key twice"],
)
def test_a_manifest_that_is_no_json_object_is_refused(directory: Path, content: bytes) -> None:
    (directory / "MANIFEST.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"MANIFEST\.json"):
        Bundle.open(directory)


def test_a_manifest_that_is_huge_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpstats.capture.manifest._MAX_BYTES", 100)
    with pytest.raises(BundleError, match="more than 100 bytes"):
        Bundle.open(directory)


def read_all(directory: Path) -> None:
    bundle = Bundle.open(directory)
    bundle.parameters(1)
    bundle.rank_part(1)


def moved_behind_a_link(path: Path) -> None:
    elsewhere = path.parent.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def replaced_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def with_another_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def forged(content: bytes) -> Callable[[Path], None]:
    """Return a function that writes another file, and a manifest that says so."""

    def forge(path: Path) -> None:
        path.write_bytes(content)
        making.rewrite_manifest(path.parent, path.name)

    return forge


@pytest.mark.parametrize(
    ("damage", "name", "text"),
    [
        *(
            (moved_behind_a_link, name, "not a file of its own directory")
            for name in ("MANIFEST.json", "model.safetensors")
        ),
        (replaced_by_a_pipe, "rank00001.safetensors", "not a file of its own directory"),
        (Path.unlink, "rank00001.safetensors", r"rank00001\.safetensors cannot be read.*copy the whole directory"),
        (
            *(lambda path: path.write_bytes(path.read_bytes()[:-10]), "rank00001.safetensors"),
            r"rank00001\.safetensors has \d+ bytes and the manifest says \d+",
        ),
        (with_another_bit, "rank00001.safetensors", "has the SHA-256"),
        *(
            (forged(content), "rank00001.safetensors", r"rank00001\.safetensors is refused")
            for content in (b"", b"PK\x03\x04", b"\x80\x02cos\nsystem\n", b"x" * 1000, b"\2" + bytes(7) + b"{}")
        ),
    ],
    ids=range(11),
)
def test_a_damaged_or_forged_file_is_refused(
    directory: Path, damage: Callable[[Path], None], name: str, text: str
) -> None:
    damage(directory / name)
    with pytest.raises(BundleError, match=text):
        read_all(directory)


class Command:
    """An object that runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


def test_a_pickle_that_runs_a_command_is_not_executed(directory: Path, tmp_path: Path) -> None:
    trap = tmp_path / "it ran"
    torch.save({"rank": Command(trap)}, directory / "rank00001.safetensors")
    making.rewrite_manifest(directory, "rank00001.safetensors")
    with pytest.raises(BundleError, match=r"rank00001\.safetensors is refused: .*Nothing of it was executed"):
        read_all(directory)
    torch.save({"rank": Command(trap)}, directory / "rank00001.safetensors", _use_new_zipfile_serialization=False)
    making.rewrite_manifest(directory, "rank00001.safetensors")
    with pytest.raises(BundleError, match="is refused"):
        read_all(directory)
    assert not trap.exists()


def test_a_tensor_that_claims_a_petabyte_is_refused(directory: Path) -> None:
    path = directory / "rank00001.safetensors"
    head = b'{"json":{"dtype":"U8","shape":[1125899906842624],"data_offsets":[0,1125899906842624]}}'
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    making.rewrite_manifest(directory, path.name)
    with pytest.raises(BundleError, match="is refused: "):
        read_all(directory)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], ["a", 1], 7], ids=range(3))
def test_a_tensor_in_an_order_that_it_cannot_have_is_refused(directory: Path, order: Any) -> None:
    content = making.load(directory / "model.safetensors")
    content["parameters"] = {"x": {"$tensor": "0", "order": order}, **content["parameters"]}
    making.rewrite_part(directory, "model.safetensors", content)
    with pytest.raises(BundleError, match="is refused: "):
        read_all(directory)


def test_a_file_that_changes_while_it_is_read_is_not_used(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, load = directory / "rank00001.safetensors", codec.read

    def changed_meanwhile(*args: Any) -> Any:
        with path.open("r+b") as file:
            file.write(path.read_bytes()[:2])
        return load(*args)

    monkeypatch.setattr(codec, "read", changed_meanwhile)
    with pytest.raises(
        BundleError, match=r"rank00001\.safetensors was changed while it was read; nothing of it is used"
    ):
        Bundle.open(directory).rank_part(1)


def test_only_its_owner_may_read_a_bundle(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = new_directory(tmp_path / "captures", "capture-20260102T030405Z-step00000012")
        write_part(directory, "model.safetensors", ModelPart({}))
        write_manifest(directory, manifest())
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def a_micro_batch(part: dict[str, Any]) -> dict[str, Any]:
    micro_batch: dict[str, Any] = part["micro_batches"][0]
    return micro_batch


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: p.pop("rank"), "missing required field `rank`"),
        (lambda p: p.update(rank=0), "is of rank 0 of 2, and the manifest says rank 1"),
        (lambda p: a_micro_batch(p).pop("random"), "missing required field `random` - at `$.micro_batches[0]`"),
        (lambda p: a_micro_batch(p).update(loss="low"), "Expected `Tensor`"),
    ],
    ids=range(4),
)
def test_a_wrong_field_of_a_part_is_named(
    directory: Path, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    path = directory / "rank00001.safetensors"
    content = making.load(path)
    change(content)
    making.rewrite_part(directory, path.name, content)
    with pytest.raises(BundleError) as caught:
        read_all(directory)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [[], {"parameters": {"x": 1}}], ids=range(2))
def test_a_model_file_of_another_shape_is_refused(directory: Path, content: Any) -> None:
    making.rewrite_part(directory, "model.safetensors", content)
    with pytest.raises(BundleError, match=r"model\.safetensors"):
        read_all(directory)


@pytest.mark.parametrize("shape", [[-3, -4], [12], [2**40, 2**40, 0], [2**70, 0]], ids=str)
def test_shards_that_no_capture_wrote_are_refused(directory: Path, shape: list[int]) -> None:
    content = making.load(directory / "model.safetensors")
    name = next(iter(content["parameters"]))
    tensor = torch.zeros(3, 4) if shape[-1] else torch.zeros(0, 4)
    content = {"parameters": {name: tensor}, "shards": {name: {"shape": shape, "offsets": [0, 0]}}}
    making.rewrite_part(directory, "model.safetensors", content)
    with pytest.raises(BundleError, match=re.escape(f"the shards of {name} do not fit together")):
        read_all(directory)


# -- one writer of manifests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "missing", "older_stay"),
    [("nonfinite", {}, False), ("nonfinite", {1: "no space left"}, True), ("exception", {1: "it raised"}, False)],
)
def test_manifest_names_what_was_written_and_removes_what_it_takes_the_place_of(
    tmp_path: Path, reason: str, missing: dict[int, str], older_stay: bool
) -> None:
    rank = 0 if reason == "exception" else None
    older, newest = (empty_bundle(tmp_path, number, rank is None, rank) for number in range(2))
    files = {rank_file(0): Written(0, hashlib.sha256().hexdigest())}
    models = {0: model_file(0)}
    verdict = {"reason": reason, "step": 1, "created_utc": "", "culprit_ranks": (), "message": ""}
    close_bundle(newest, 1, files, (0, 1), models, missing, **verdict)
    read = read_manifest(newest)
    assert (read.complete, read.ranks_present, read.model_files, read.missing) == (not missing, (0,), {}, missing)
    assert older.exists() == older_stay


# -- prune ------------------------------------------------------------------------------------------------------------


def names(directory: Path) -> list[str]:
    return sorted(path.name[-2:] for path in directory.iterdir())


def test_prune_after_each_write_keeps_as_many_as_asked_for(tmp_path: Path) -> None:
    for count in range(1, 8):
        prune(tmp_path, 5, empty_bundle(tmp_path, count))
        assert len(names(tmp_path)) == min(count, 5)
    assert names(tmp_path) == ["03", "04", "05", "06", "07"]


def test_prune_leaves_what_is_incomplete(tmp_path: Path) -> None:
    made = [empty_bundle(tmp_path, number, kind) for number, kind in enumerate([None, False, True, True])]
    assert prune(tmp_path, 1, made[3]) == [made[2]]
    assert names(tmp_path) == ["00", "01", "03"]


def test_prune_counts_bundles_of_one_rank_by_themselves(tmp_path: Path) -> None:
    together = [empty_bundle(tmp_path, number) for number in range(3)]
    alone = {rank: [empty_bundle(tmp_path, number, False, rank) for number in range(3)] for rank in (0, 12)}
    assert prune(tmp_path, 1, alone[12][1]) == [alone[12][0], alone[12][2]]
    assert prune(tmp_path, 1, together[2]) == together[:2]
    assert set(tmp_path.iterdir()) == {together[2], *alone[0], alone[12][1]}


def test_prune_leaves_files_of_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = [empty_bundle(tmp_path, number) for number in range(5)]
    (made[0] / "notes.txt").write_text("look here again")
    (made[1] / "MANIFEST.json").write_text('{"format": "another"}')
    (tmp_path / "capture-mine").mkdir()
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    made[2].rename(outside)
    made[2].symlink_to(outside)
    assert prune(tmp_path, 1, made[4]) == [made[3]]
    assert (made[0] / "notes.txt").exists()
    assert (made[0] / "MANIFEST.json").exists()
    assert (outside / "MANIFEST.json").exists()
    assert "notes.txt is not a file of a capture" in caplog.text


def test_a_bundle_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    made = [empty_bundle(tmp_path, number) for number in range(2)]
    monkeypatch.setattr(Path, "unlink", refuse)  # root may remove anything, whatever its mode is
    assert prune(tmp_path, 1, made[1]) == []
    assert "cannot be removed: [Errno 13] Permission denied" in caplog.text
    assert names(tmp_path) == ["00", "01"]
