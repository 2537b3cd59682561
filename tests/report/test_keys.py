"""The report names keys that ranks lack, also where records have dropped lines, and draws values by rank."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ddpstats._base.marks import Mark
from ddpstats.report import read_directories
from ddpstats.report.formats import page_of
from ddpstats.report.timeline import report_of
from tests import formats
from tests.report import records
from tests.report.browser import Browser
from tests.report.conftest import Report
from tests.report.test_page import chart, page


def keys_of(directory: Path) -> dict[str, dict[str, Any]]:
    return {key["key"]: key for key in records.report_on(directory)["keys"]}


def values(seq: int, rank: int = 0, **numbers: float | None) -> Mark:
    return Mark("values", "train", records.BEGAN + seq * 1e-3 + rank * 1e-5, values=numbers)


def test_ranks_that_dropped_different_lines_have_equal_keys(tmp_path: Path) -> None:
    """One rank's lines are longer than the other's, so their files are full at different times."""
    for rank in range(2):
        site = "train.py:31 in reduce_stats" + "_of_this_rank" * rank
        events = [records.event(seq, ("loss", "acc")[seq % 2], rank, site=site) for seq in range(1, 801)]
        marks = [values(seq, rank, norm=float(seq)) for seq in range(1, 801)]
        records.write_rank(tmp_path, rank, 2, events, marks=marks, max_bytes=150_000)
    report = records.report_on(tmp_path)
    first, second = (rank["collectives"] for rank in report["ranks"])
    assert abs(first - second) > 4
    assert max(first, second) < 800
    assert [key["key"] for key in report["keys"] if key["missing_ranks"] or key["fewer_ranks"]] == []
    counts = {key["key"]: [key["by_rank"][rank]["count"] for rank in "01"] for key in report["keys"]}
    assert all(of[0] == of[1] > 20 for of in counts.values()), counts


def test_key_that_differs_after_dropped_lines_is_found(tmp_path: Path) -> None:
    for rank in range(2):
        labels = ["other" if (rank, seq) in ((1, 700), (1, 702)) else "loss" for seq in range(1, 801)]
        events = [records.event(seq, label, rank) for seq, label in enumerate(labels, 1)]
        records.write_rank(tmp_path, rank, 2, events, max_bytes=60_000)
    keys = keys_of(tmp_path)
    assert (keys["other"]["missing_ranks"], keys["loss"]["fewer_ranks"]) == ([0], [1])


@pytest.mark.parametrize(("end", "fewer"), [("left", [1]), (None, [])])
def test_key_may_lack_in_last_round_of_killed_process_only(end: str | None, fewer: list[int], tmp_path: Path) -> None:
    for rank in range(2):
        events = [records.event(seq, "loss", rank) for seq in range(1, 11 - rank)]
        marks = [values(seq, norm=1.0) for seq in range(1, 11 - rank)]
        records.write_rank(tmp_path, rank, 2, events, marks=marks, end=end if rank else "left")
    keys = keys_of(tmp_path)
    assert [keys[name]["fewer_ranks"] for name in ("loss", "norm")] == [fewer, fewer]


def test_rank_without_record_lacks_no_key(tmp_path: Path) -> None:
    records.write_rank(tmp_path, 0, 2, [records.event(1, "loss")])
    loss = keys_of(tmp_path)["loss"]
    assert (loss["missing_ranks"], loss["fewer_ranks"]) == ([], [])


def test_key_without_value_on_any_rank_is_left_out(tmp_path: Path) -> None:
    for rank in range(2):
        records.write_rank(tmp_path, rank, 2, [], marks=[values(1, loss=1.0, none=None)])
    assert list(keys_of(tmp_path)) == ["loss"]


def test_text_has_last_value_of_each_rank(tmp_path: Path, report: Report) -> None:
    for rank, last in enumerate((0.25, math.inf)):
        marks = [values(1, loss=1.0), values(2, loss=math.nan if rank else 2.0), values(3, loss=last)]
        records.write_rank(tmp_path, rank, 2, [records.event(1, "x", rank)], marks=marks)
    text = report(tmp_path, status=0)
    assert "'loss' (reduction 'train'):\n    rank 0: 0.25\n    rank 1: inf, 2 of 3 values not finite\n" in text
    (loss,) = (key for key in json.loads(report(tmp_path, "--json", status=0))["keys"] if key["key"] == "loss")
    assert [loss["by_rank"][rank]["not_finite"] for rank in "01"] == [0, 2]


@pytest.mark.slow
def test_chart_keeps_peak_and_nan_inside_its_picture(tmp_path: Path, chromium: Browser) -> None:
    """Values that come long after the last collective; NaN and a peak among very many."""
    for rank in range(2):
        marks = [values(5_000 + seq, rank, loss=1.0 + seq, v=1.0) for seq in range(3_000)]
        marks[1001] = values(6_001, rank, loss=math.nan if rank else 1e6, v=2.0)
        records.write_rank(tmp_path, rank, 2, [records.event(1, None, rank)], marks=marks)
    chromium.open(page(read_directories([tmp_path]), tmp_path / "page.html"))
    chart(chromium, "loss")
    picture = "document.querySelector('#values svg')"
    wide = chromium.run(f"{picture}.viewBox.baseVal.width")
    points = chromium.run(
        f"[...{picture}.querySelectorAll('polyline')].map(line => Array.from(line.points, one => [one.x, one.y]))"
    )
    assert len(points) == 2
    assert all(0 <= x <= wide and 0 <= y <= 240 for line in points for x, y in line)
    assert [min(y for _, y in line) for line in points] == [pytest.approx(20), pytest.approx(219.4, abs=0.5)]
    assert "NaN on rank 1" in chromium.run(f"{picture}.textContent")
    assert "Of very many values some" in chromium.run("document.querySelector('#values').textContent")


@pytest.mark.slow
def test_page_is_all_clear_only_where_everything_was_compared(tmp_path: Path, chromium: Browser) -> None:
    text = "document.querySelector('#summary').textContent"
    alike, killed = tmp_path / "alike", tmp_path / "killed"
    records.write(alike, 2, 3, parts=False)
    records.write_rank(killed, 0, 2, [])
    (killed / "rank0.jsonl").write_text((killed / "rank0.jsonl").read_text().replace('"ranks":[0,1]', '"ranks":[0]'))
    doubt = {"kind": "doubt", "message": "names differ", "group": "0", "seq": 1, "by_rank": {}}
    doubts = {"findings": [{**doubt, "missing_ranks": [], "culprit_ranks": []}], "verdict": ""}
    captures = Path(formats.__file__).parent / "v2" / "captures"
    for directory, changes, all_is_well, nothing in (
        (alike, {}, True, True),
        (alike, doubts, False, True),
        (killed, {}, False, False),
        (captures, {}, False, False),
    ):
        recorded = read_directories([directory])
        report = {**report_of(recorded), **changes}
        (tmp_path / "page.html").write_text(page_of(recorded, report))
        chromium.open(tmp_path / "page.html")
        assert ("All ranks issued the same collectives" in chromium.run(text)) == all_is_well
        assert chromium.run("document.title").endswith("nothing found" if nothing else "something found")
        assert report["verdict"] in chromium.run(text)
