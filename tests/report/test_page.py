"""The page in a real Chromium: what it shows, by keys, in the dark, with many events, and what strangers wrote."""

from __future__ import annotations

import base64
import json
import struct
import tempfile
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddpstats import cli
from ddpstats._base.marks import Mark
from ddpstats.report._page import page_of
from ddpstats.report._sources import read_timeline
from ddpstats.report._timeline import Lane, Timeline
from tests.report import records
from tests.report.browser import Browser, browser

HOSTILE = "</script><img src=x onerror=alert(1)>{{data}}\u2028\ud800"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory() as directory, browser(Path(directory)) as found:
        yield found


@pytest.fixture(autouse=True)
def no_problem(request: pytest.FixtureRequest) -> Iterator[None]:
    """No console error, and nothing asked for but the page itself."""
    yield
    if "chromium" in request.fixturenames:
        found: Browser = request.getfixturevalue("chromium")
        assert found.problems == []
        assert [url for url in found.requests if not url.startswith("file:///")] == []


def page(timeline: Timeline, path: Path, text: str = "") -> Path:
    path.write_text("".join(page_of(timeline, text)))
    return path


def chart(chromium: Browser, key: str) -> None:
    """Click on a key whose values are known."""
    of_values = f"one.textContent === '{key}' && one.title.startsWith('show the values')"
    chromium.run(f"[...document.querySelectorAll('#keys button')].find(one => {of_values}).click()")


def drawn_ms(chromium: Browser, key: str) -> float:
    """The quickest of some frames: other programs keep this machine busy."""
    found = []
    for _ in range(30):
        chromium.press(key)
        found.append(float(chromium.run("document.querySelector('#lanes').dataset.drawMs")))
    return min(found)


def test_the_seeds_mismatch_is_visible(tmp_path: Path, chromium: Browser, capsys: pytest.CaptureFixture[str]) -> None:
    records.write(tmp_path, 4, 30)
    assert cli.main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 1
    chromium.open(tmp_path / "page.html")
    shown = chromium.run("document.body.innerText")
    for words in ("'snr_loss'", "train.py:34 in reduce_stats", "dist.all_reduce(stats[key])", "Here the ranks part."):
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
    chromium.screenshot(tmp_path / "light.png", whole=True)


def test_all_of_it_by_keys(tmp_path: Path, chromium: Browser) -> None:
    chromium.open(page(read_timeline([records.write(tmp_path, 4, 30)]), tmp_path / "page.html"), dark=True)
    said = "document.querySelector('#said').textContent"
    assert chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    first = chromium.run(said)
    chromium.press("ArrowUp", ",")
    assert chromium.run(said).startswith("rank 2, number ")
    chromium.press(",", "n")
    assert chromium.run(said) == first
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


def test_what_strangers_wrote_stays_text(tmp_path: Path, chromium: Browser) -> None:
    """In every field that can hold text, and in the text below."""
    timeline = read_timeline([records.write(tmp_path, 2, 2)])
    of_strangers = replace(
        timeline,
        calls=[
            replace(call, what=HOSTILE, op=HOSTILE, label=HOSTILE, site=HOSTILE, source=HOSTILE)
            for call in timeline.calls
        ],
        groups={name: replace(group, words=HOSTILE) for name, group in timeline.groups.items()},
        keys=[replace(key, name=HOSTILE, place=HOSTILE) for key in timeline.keys],
        marks=[Mark(HOSTILE, HOSTILE, timeline.began, None, (0, 99))],
        findings=[replace(finding, kind=HOSTILE, message=HOSTILE) for finding in timeline.findings],
        notes=[HOSTILE],
    )
    path = tmp_path / "page.html"
    path.write_text("".join(page_of(of_strangers, HOSTILE)), errors="backslashreplace")
    assert path.read_text().count("</script>") == 2
    assert "onerror=alert" not in path.read_text().replace("&lt;img src=x onerror=alert", "")
    chromium.open(path)
    chromium.press("n", ".", "ArrowDown")
    chromium.run("[...document.querySelectorAll('#keys button')].forEach(one => one.click())")
    assert chromium.run("document.images.length") == 0
    assert chromium.run("document.querySelector('#findings pre').textContent").startswith("</script><img")


def test_frames_do_not_grow_with_the_events(tmp_path: Path, chromium: Browser) -> None:
    """At most one mark is drawn for a pixel, however many events it stands for."""
    small = read_timeline([records.write(tmp_path, 2, 20, parts=False)])

    def of(count: int) -> Timeline:
        times = array("d", (small.began + place / count for place in range(count)))
        lanes = [
            Lane(rank, times, array("L", [0, 1]) * (count // 2), array("Q", range(1, count + 1)), True, "")
            for rank in range(8)
        ]
        return replace(small, lanes=lanes, marks=[], keys=[], ended=small.began + 1)

    took = []
    for count in (2_000, 50_000):
        chromium.open(page(of(count), tmp_path / f"{count}.html"))
        took.append((drawn_ms(chromium, "0"), drawn_ms(chromium, "+"), drawn_ms(chromium, "ArrowRight")))
        assert chromium.run("document.querySelector('#shown').textContent") == f"{8 * count:,} events"
    for few, many in zip(*took, strict=True):
        assert many < 5 * max(few, 2.0), took


def test_the_columns_are_what_they_say(tmp_path: Path) -> None:
    """The layout, as the page's script reads it; pauses of hours fit as well."""
    timeline = read_timeline([records.write(tmp_path, 2, 3)])
    late = array("d", [*timeline.lanes[0].times[:-1], timeline.began + 9e4])
    timeline = replace(timeline, lanes=[replace(timeline.lanes[0], times=late), timeline.lanes[1]])
    html = "".join(page_of(timeline, ""))
    packed = html.partition('id="data">')[2].partition("<")[0]
    raw = zlib.decompress(base64.b64decode(packed))
    start = 4 + struct.unpack("<I", raw[:4])[0]
    header = json.loads(raw[4:start])
    numbers = struct.unpack(f"<{(len(raw) - start) // 4}I", raw[start:])
    assert len(numbers) == 2 * 3 * 6
    waits, calls, steps = numbers[:6], numbers[6:12], numbers[12:18]
    assert sum(waits) * header["tick"] == pytest.approx(9e4)
    assert [timeline.calls[call].label for call in calls] == ["loss", "acc"] * 3
    assert steps == (0,) * 6
