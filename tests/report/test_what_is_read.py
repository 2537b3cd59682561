"""The report reads all directories of a run, and names each file that it leaves out or refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpstats._base.marks import Mark
from tests.dump.hand_made import forward, tensor, write_rank
from tests.report import records
from tests.report.conftest import Report


def apart(directory: Path, ranks: int = 2) -> list[str]:
    """Write each rank's record to another directory, as two hosts do."""
    directories = []
    for rank in range(ranks):
        host = directory / f"host{rank}"
        records.write_rank(host, rank, ranks, [records.event(seq, "loss", rank) for seq in (1, 2)])
        directories.append(str(host))
    return directories


def test_directories_of_hosts_are_read_together(tmp_path: Path, report: Report) -> None:
    directories = apart(tmp_path)
    older = records.recording_of(Path(directories[1]), 3, 4, "older")
    older.close()
    content = (tmp_path / "host1" / "rank3.jsonl").read_text()
    (tmp_path / "host1" / "rank3.jsonl").write_text(content.replace(str(json.loads(content)["time"]), "5.0"))
    shown = json.loads(report(*directories, "--json", status=0))
    assert [(rank["rank"], rank["collectives"]) for rank in shown["ranks"]] == [(0, 2), (1, 2)]
    assert shown["world_size"] == 2
    report(directories[0], directories[0] + "/", directories[1], status=0)  # one of them twice


def test_two_records_of_a_rank_are_refused(tmp_path: Path, report: Report) -> None:
    directories = apart(tmp_path)
    shutil.copy(tmp_path / "host0" / "rank0.jsonl", tmp_path / "host1")
    text = report(*directories, status=2)
    assert all(f"{host}/rank0.jsonl" in text for host in directories)


def test_record_under_other_name_is_left_out(tmp_path: Path, report: Report) -> None:
    records.write(tmp_path, 2, 1, parts=False)
    for name in ("rank1 (copy).jsonl", "rank2.jsonl"):
        shutil.copy(tmp_path / "rank1.jsonl", tmp_path / name)
    text = report(tmp_path, status=0)
    assert text.startswith("2 of 2 ranks left a record of the run of 20")
    assert "rank1 (copy).jsonl is left out: it is a record of rank 1" in text
    assert "rank2.jsonl is left out: it is a record of rank 1" in text


@pytest.mark.parametrize("size", [0, 20])
def test_record_without_whole_line_is_left_out(size: int, tmp_path: Path, report: Report) -> None:
    records.write(tmp_path, 2, 3)
    os.truncate(tmp_path / "rank1.jsonl", size)
    text = report(tmp_path, status=1)
    assert "rank1.jsonl is left out: the process had not written a whole line when it ended" in text
    assert "rank 1: wrote no record" in text
    os.truncate(tmp_path / "rank0.jsonl", size)
    assert "rank0.jsonl is left out: " in report(tmp_path, status=2)


def test_rank_killed_between_its_two_files_keeps_the_older(tmp_path: Path, report: Report) -> None:
    """The older file has all that is left, and it is unknown whether there was another before it."""
    records.write(tmp_path, 2, 3)
    (tmp_path / "rank1.jsonl").rename(tmp_path / "rank1.old.jsonl")
    text = report(tmp_path, status=1)
    assert "  rank 1: 6 collectives (the newest; older ones were dropped)" in text
    assert "'snr_loss'" in text


def test_damaged_bundle_is_left_out_and_named(tmp_path: Path, report: Report) -> None:
    records.write(tmp_path, 2, 1, parts=False)
    kept = next((Path(__file__).parents[1] / "formats" / "v2" / "captures").iterdir())
    bundle = shutil.copytree(kept, tmp_path / kept.name)
    (bundle / "MANIFEST.json").write_text("{")
    assert f"note: {bundle.name} is left out: " in report(tmp_path, status=0)


def test_damaged_dump_is_left_out_and_named(tmp_path: Path, report: Report) -> None:
    records.write(tmp_path, 2, 1, parts=False)
    (tmp_path / "step3" / "rank0").mkdir(parents=True)
    (tmp_path / "step3" / "rank0" / "dump.json").write_text("{")
    assert "note: step3 is left out: " in report(tmp_path, status=0)


def test_long_lists_are_cut_and_counted(tmp_path: Path, report: Report) -> None:
    for rank in (0, 1):
        events = [records.event(seq, f"key {seq} of rank {rank}", rank) for seq in range(1, 11)]
        alarms = [Mark("sentinel", "far from normal", records.BEGAN + step, step, (rank,)) for step in range(10)]
        values = Mark("values", "train", records.BEGAN, values={f"path {number}": 1.0 for number in range(18)})
        records.write_rank(tmp_path, rank, 2, events, marks=[*alarms, values])
    text = report(tmp_path, status=1)
    assert text.count("sentinel on rank") == 16
    assert "\nand 4 more, which --json has\n" in text
    more = re.findall(r"and (\d+) more, which --json and --html have", text)
    assert more == ["4", "2"]  # of 20 keys that differ between ranks, and of 18 paths


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("left", ""),
        ("KeyboardInterrupt", "left by KeyboardInterrupt"),
        (None, "its record has no end mark: the process was killed, hangs, or still runs"),
    ],
)
def test_end_of_rank_is_shown(end: str | None, text: str, tmp_path: Path, report: Report) -> None:
    for rank, how in enumerate(("left", end)):
        records.write_rank(tmp_path, rank, 2, [records.event(1, "loss", rank)], end=how)
    assert f"  rank 0: 1 collectives\n  rank 1: 1 collectives{'; ' if text else ''}{text}\n" in report(
        tmp_path, status=0
    )
    assert [rank["end"] for rank in json.loads(report(tmp_path, "--json", status=0))["ranks"]] == ["", text]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "rank1.jsonl, line 1: "),
        (lambda path: path.symlink_to("/nowhere"), "No such file or directory: .*rank1.jsonl"),
        (lambda path: path.mkdir(), "Is a directory: .*rank1.jsonl"),
    ],
    ids=["link", "dangling", "directory"],
)
def test_link_or_directory_as_record_is_refused_by_name(
    make: Callable[[Path], Any], text: str, tmp_path: Path, report: Report
) -> None:
    records.write(tmp_path, 1, 1)
    make(tmp_path / "rank1.jsonl")
    printed = report(tmp_path, status=2)
    assert "Errno" not in printed
    assert re.search(text, printed)


def test_directory_that_does_not_exist_is_named(tmp_path: Path, report: Report) -> None:
    assert "nowhere is no directory" in report(tmp_path / "nowhere", status=2)
    (tmp_path / "file").write_text("")
    assert "file is no directory" in report(tmp_path / "file", status=2)
    assert "holds no rank*.jsonl" in report(tmp_path, status=2)


def test_stats_dump_without_a_nan_is_a_report_without_findings(tmp_path: Path, report: Report) -> None:
    write_rank(tmp_path / "step0" / "rank0", [("Torch.a.0.forward", forward(tensor(1.0), out=tensor(1.0)))])
    assert "note: in the stats dumps no NaN or infinity was found" in report(tmp_path, status=0)
