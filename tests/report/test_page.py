"""The page shows divergence, keys and values in a real Chromium, by keyboard too, and runs no foreign text."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from ddpstats._base.marks import Mark
from ddpstats.guard.event import Event
from ddpstats.report import read_directories
from ddpstats.report.formats import page_of
from ddpstats.report.timeline import Recorded, report_of
from tests.report import records
from tests.report.browser import Browser
from tests.report.conftest import Report

HOSTILE = "</script><img src=x onerror=alert(1)>{{data}}\u2028\ud800"


def page(recorded: Recorded, path: Path) -> Path:
    path.write_text(page_of(recorded, report_of(recorded)))
    return path


def chart(chromium: Browser, key: str) -> None:
    """Click on a key whose values are known."""
    of_values = f"button.textContent === '{key}' && button.title.startsWith('show the values')"
    chromium.run(f"[...document.querySelectorAll('#keys button')].find(button => {of_values}).click()")


@pytest.mark.slow
def test_page_shows_first_divergence_keys_and_values(tmp_path: Path, chromium: Browser, report: Report) -> None:
    records.write(tmp_path, 4, 30)
    report(tmp_path, "--html", str(tmp_path / "page.html"), status=1)
    chromium.open(tmp_path / "page.html")
    shown = chromium.run("document.body.innerText")
    for words in ("'snr_loss'", "train.py:34 in reduce_stats", "dist.all_reduce(stats[key])", "the ranks diverge."):
        assert words in shown
    assert chromium.run("document.querySelectorAll('#detail tr.odd').length") == 1  # rank 3
    assert "rank 3" in chromium.run("document.querySelector('#said').textContent")
    lacking = "[...document.querySelectorAll('#keys .lacks')].map(cell => cell.title)"
    assert chromium.run(lacking) == [f"rank {rank}: not once" for rank in (0, 1, 2, 1)]
    pixels = "Array.from(paint.getImageData(0, 0, canvas.width, canvas.height).data)"
    assert (
        chromium.run(f"{pixels}.filter((red, i, all) => i % 4 === 0 && red === 201 && all[i + 1] === 42).length") > 500
    )  # the marks, the line and the flag of the divergence
    chart(chromium, "acc")
    assert chromium.run("document.querySelectorAll('#values polyline').length") == 3


@pytest.mark.slow
def test_page_is_driven_by_keyboard_in_dark_mode(tmp_path: Path, chromium: Browser) -> None:
    chromium.open(page(read_directories([records.write(tmp_path, 4, 30)]), tmp_path / "page.html"), dark=True)
    description = "document.querySelector('#said').textContent"
    assert chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    first = chromium.run(description)
    chromium.press("ArrowUp", ",")
    assert chromium.run(description).startswith("rank 2, number ")
    chromium.press(",", "n")
    assert chromium.run(description) == first
    span = "view.to - view.from"
    before = chromium.run(span)
    chromium.press("+")
    assert chromium.run(span) < before
    chromium.press("-", "-", "ArrowRight", "0")
    assert chromium.run(span) > 0.06
    chromium.press("/", *"snr")
    chromium.run("new Promise(done => setTimeout(done, 300))")
    assert chromium.run("document.querySelector('#shown').textContent") == "1 of 240 events"
    chromium.press("Escape", "?")
    assert chromium.run("document.querySelector('#help').open") is True
    assert "search" in chromium.run("document.querySelector('#help').innerText")


@pytest.mark.slow
def test_foreign_text_stays_text(tmp_path: Path, chromium: Browser) -> None:
    """Every field that can hold text, and the text below the picture, hold a script."""
    recorded = read_directories([records.write(tmp_path, 2, 2)])

    def hostile(event: Event) -> Event:
        signature = replace(event.signature, op=HOSTILE)
        return replace(event, signature=signature, label=HOSTILE, site=HOSTILE, read_source=HOSTILE, pieces=HOSTILE)

    of_strangers = recorded._replace(
        records=[replace(record, events=tuple(map(hostile, record.events))) for record in recorded.records],
        marks=[Mark(HOSTILE, HOSTILE, records.BEGAN, None, (0, 99))],
        notes=[HOSTILE],
    )
    report = report_of(recorded)
    hostile_report = {
        **report_of(of_strangers),
        "groups": {name: {**group, "words": HOSTILE} for name, group in report["groups"].items()},
        "keys": [{**key, "key": HOSTILE, "used_in": HOSTILE} for key in report["keys"]],
        "findings": [{**finding, "kind": HOSTILE, "message": HOSTILE} for finding in report["findings"]],
    }
    path = tmp_path / "page.html"
    path.write_text(page_of(of_strangers, hostile_report), errors="backslashreplace")
    assert path.read_text().count("</script>") == 2
    assert "onerror=alert" not in path.read_text().replace("&lt;img src=x onerror=alert", "")
    chromium.open(path)
    chromium.press("n", ".", "ArrowDown")
    chromium.run("[...document.querySelectorAll('#keys button')].forEach(button => button.click())")
    assert chromium.run("document.images.length") == 0
    assert chromium.run("document.querySelector('#findings pre').textContent").startswith("</script><img")


def test_columns_of_page_hold_times_calls_and_steps(tmp_path: Path) -> None:
    """The page's script reads this layout."""
    recorded = read_directories([records.write(tmp_path, 2, 3)])
    first, second = recorded.records
    late = replace(first.events[-1], started=records.BEGAN + 9e4)
    recorded = recorded._replace(records=[replace(first, events=(*first.events[:-1], late)), second])
    packed = page_of(recorded, report_of(recorded)).partition('id="data">')[2].partition("<")[0]
    data = json.loads(zlib.decompress(base64.b64decode(packed)))
    lane = data["lanes"][0]
    assert sum(lane["time"]) == pytest.approx(9e10)
    assert [data["calls"][call]["label"] for call in lane["call"]] == ["loss", "acc"] * 3
    assert lane["seq"] == [1] * 6
