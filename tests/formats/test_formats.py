"""Files that an earlier ddpstats wrote are read as they were meant; those of an unknown format are refused by name.

``vN`` is what `tests.formats.make` wrote when format N was today's. It stays as it is, and so does what is asserted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats._rerun.codec import from_plain
from ddpstats._rerun.state import RandomState
from ddpstats.capture.bundle import Bundle
from ddpstats.dump.analyze import RankDump, find_ranks
from ddpstats.dump.analyze.tensors import load_tensor
from ddpstats.dump.config import read_config
from ddpstats.errors import BundleError, DdpstatsError, DumpError
from ddpstats.guard.record import diagnose, read_records
from ddpstats.report import run

HERE = Path(__file__).parent
V1, V2 = HERE / "v1", HERE / "v2"
NAMES = ["Tensor.sqrt.0.forward", "Module.root.Net.forward.0", "Tensor.sqrt.0.backward"]


def test_bundle_of_format_2_is_read() -> None:
    bundle = Bundle.open(V2 / "captures")
    manifest, part = bundle.manifest, bundle.rank_part(0)
    assert (manifest.reason, manifest.complete, manifest.ranks) == ("nonfinite", True, (0,))
    assert (manifest.culprit_ranks, manifest.parameters) == ((0,), {0: ["weight"]})
    assert "NaN in weight, first in micro-batch 0 of 1" in manifest.message
    (micro,) = part.micro_batches
    batch = from_plain(micro.batch)
    assert batch["x"].tolist() == [1.0, -1.0]
    assert batch["names"] == ["a", "b"]
    assert RandomState.from_plain(micro.random).torch_cpu.dtype is torch.uint8
    assert part.gradients is not None
    assert [math.isnan(value) for value in part.gradients["weight"].tolist()] == [False, True]
    assert (part.parameter_names, list(part.buffers)) == (["weight"], ["seen"])
    assert bundle.parameters(0)["weight"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (3, "written by a newer ddpstats: format 3, this one reads 2; upgrade ddpstats"),
        (1, "of format 1, which is unknown: this ddpstats reads 2"),
    ],
)
def test_bundle_of_another_format_is_refused_with_its_number(tmp_path: Path, version: int, message: str) -> None:
    shutil.copytree(V2 / "captures", tmp_path / "captures")
    (path,) = tmp_path.glob("captures/*/MANIFEST.json")
    rewritten(path, "version", version)
    with pytest.raises(BundleError, match=message):
        Bundle.open(path.parent)


def dump(name: str) -> RankDump:
    (rank_dump,) = find_ranks(V1 / name)
    return rank_dump


def test_dump_of_format_1_is_read() -> None:
    rank_dump = dump("dump")
    assert (rank_dump.complete, rank_dump.task, rank_dump.level, rank_dump.step, rank_dump.rank) == (
        True,
        "tensor",
        "mix",
        0,
        None,
    )
    entries = {entry.name: entry for entry in rank_dump.entries()}
    assert list(entries) == NAMES
    ((path, leaf),) = entries[NAMES[0]].inputs
    assert (path, leaf.shape, leaf.max, leaf.min, leaf.nan_count) == ("input.0", (2,), 2.0, -3.0, 0)
    ((_, made),) = entries[NAMES[0]].outputs
    assert (made.nan_count, made.raw["first_bad"]) == (1, [1])
    assert load_tensor(rank_dump, leaf).tolist() == [2.0, -3.0]
    assert rank_dump.stack_of(NAMES[0])[1].startswith("File train.py, line 2, in step")
    assert rank_dump.parent_of(NAMES[0]) == NAMES[1]


def test_lines_of_format_1_of_an_unfinished_step_are_read() -> None:
    rank_dump = dump("killed")
    assert (rank_dump.complete, rank_dump.task) == (False, "statistics")
    assert [entry.name for entry in rank_dump.entries()] == NAMES
    assert rank_dump.stack_of(NAMES[0])[1].startswith("File train.py, line 2, in step")


def test_records_of_format_1_are_read() -> None:
    records = read_records(V1 / "records")
    assert [(record.rank, record.world_size, record.complete, record.end is not None) for record in records] == [
        (0, 2, True, True),
        (1, 2, True, True),
    ]
    assert [event.signature.op for event in records[1].events] == ["all_reduce", "broadcast"]
    assert [event.label for event in records[1].events] == ["loss", "loss"]
    (finding,) = diagnose(records)
    assert "What differs: the shape" in finding.message
    assert "tests/formats/make.py:" in finding.message


def test_evidence_for_a_label_as_release_0_1_0_wrote_it_is_read(tmp_path: Path) -> None:
    for rank, key in enumerate(("ctc", "att")):
        lines = (V1 / "records" / f"rank{rank}.jsonl").read_text().splitlines()
        evidence = [key, ["ctc", "att"], "dict", "keyed", "whole", [], False, False, "loop", None]
        lines[2] = json.dumps({**json.loads(lines[2]), "label": key, "evidence": evidence})
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    (finding,) = diagnose(read_records(tmp_path))
    assert "What differs: the label" in finding.message


def test_configuration_is_read() -> None:
    config = read_config(V1 / "config.json")
    assert (config.ranks, config.steps, config.level) == (frozenset({0, 2, 3}), frozenset({1}), "L1")
    assert (config.names, config.summary_mode) == (("linear",), "md5")


def rewritten(path: Path, key: str, value: Any) -> None:
    """Another version in the first object of a file."""
    first, newline, rest = path.read_text().partition("\n") if path.suffix == ".jsonl" else (path.read_text(), "", "")
    path.write_text(json.dumps({**json.loads(first), key: value}) + newline + rest)


def open_records(directory: Path) -> None:
    run(argparse.Namespace(directories=[directory], json=False, html=None, perfetto=None))


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (2, "written by a newer ddpstats: format 2, this one reads 1; upgrade ddpstats"),
        (0, "of format 0, which is unknown: this ddpstats reads 1"),
        ("1", "of format 1, which is unknown"),
    ],
    ids=["newer", "older", "no number"],
)
@pytest.mark.parametrize(
    ("files", "key", "read"),
    [
        ("dump/*/*/dump.json", "ddpstats", lambda root: find_ranks(root / "dump")),
        ("killed/*/*/dump.jsonl", "ddpstats", lambda root: find_ranks(root / "killed")),
        ("records/rank1.jsonl", "ddpstats", lambda root: open_records(root / "records")),
    ],
    ids=["dump", "lines", "record"],
)
def test_unknown_format_is_refused_with_its_number(
    tmp_path: Path, files: str, key: str, read: Any, version: Any, message: str
) -> None:
    root = tmp_path / "v1"
    shutil.copytree(V1, root)
    (path,) = root.glob(files)
    rewritten(path, key, version)
    with pytest.raises(DdpstatsError) as caught:
        read(root)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


class Command:
    """Unpickling an object of this class runs a command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


@pytest.mark.parametrize("is_archive", [True, False])
def test_dumped_tensor_whose_pickle_runs_a_command_is_refused(tmp_path: Path, is_archive: bool) -> None:
    shutil.copytree(V1 / "dump", tmp_path / "dump")
    (rank_dump,) = find_ranks(tmp_path / "dump")
    ((_, leaf),) = next(iter(rank_dump.entries())).inputs
    assert leaf.data_name is not None
    path, trap = rank_dump.tensor_file(leaf.data_name), tmp_path / "it ran"
    torch.save(Command(trap), path, _use_new_zipfile_serialization=is_archive)
    with pytest.raises(DumpError, match="cannot be read as a tensor"):
        load_tensor(rank_dump, leaf)
    assert not trap.exists()


def test_kept_files_name_no_machine() -> None:
    for path in (*V1.rglob("*"), *V2.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        for name in (str(HERE.parents[1]), str(Path.home()) + "/", socket.gethostname()):
            assert name.encode() not in content, path
