"""The page opens on the first finding, and pointer, buttons and filters go where they say, in a real Chromium."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddpstats._base.marks import Mark
from ddpstats.report import read_directories
from tests.report import records
from tests.report.browser import Browser
from tests.report.test_page import page

pytestmark = pytest.mark.slow  # each test needs Chromium

SAID = "document.querySelector('#said').textContent"
MIDDLE = "(view.from + view.to) / 2"
SPAN = "view.to - view.from"


def parting(directory: Path, *, late_sec: float, clock_sec: float) -> Path:
    """Rank 2 parts at number 50 of 100; from 45 on rank 0 comes late, and its clock is ahead."""
    for rank in range(3):
        events = []
        for seq in range(1, 101):
            waits = (late_sec if seq >= 45 else 0.0) + clock_sec if rank == 0 else 0.0
            label = "other" if (rank, seq) == (2, 50) else "loss"
            events.append(records.event(seq, label, rank, started=records.BEGAN + seq * 1e-3 + waits))
        records.write_rank(directory, rank, 3, events)
    return directory


@pytest.mark.parametrize(
    ("late_sec", "clock_sec"), [(0.0, 0.0), (0.04, 0.0), (2.0, 0.0), (0.0, 3600.0), (0.0, -3600.0)]
)
def test_page_opens_on_divergence_whatever_clocks_show(
    late_sec: float, clock_sec: float, tmp_path: Path, chromium: Browser
) -> None:
    recorded = read_directories([parting(tmp_path, late_sec=late_sec, clock_sec=clock_sec)])
    chromium.open(page(recorded, tmp_path / "page.html"))

    def is_there() -> bool:
        description = chromium.run(SAID)
        at = chromium.run(f"[{MIDDLE}, lanes[2].time[49], {SPAN}]")
        return (
            "rank 2, number 50 of" in description
            and "Here the ranks diverge." in description
            and abs(at[0] - at[1]) < at[2] / 2
        )

    assert is_there()
    assert chromium.run(SPAN) < 0.2  # its neighbours, not the hour until the other clock
    assert chromium.run("document.querySelectorAll('#detail tr.odd').length") == 1
    chromium.press("0", "ArrowUp", ".", "n")
    assert is_there()
    chromium.press("/", *"loss")
    chromium.run("new Promise(done => setTimeout(done, 300))")
    assert chromium.run("document.querySelector('#shown').textContent") == "299 of 300 events"
    chromium.press("Escape", "0", "n")  # the search hides this event, and it is gone to all the same
    assert is_there()
    chromium.click("#findings button")
    assert is_there()


def test_page_opens_on_missing_rank_of_second_guard(tmp_path: Path, chromium: Browser) -> None:
    """The second guard's numbers begin again."""
    for rank in range(2):
        first = [records.event(seq, "loss", rank) for seq in range(1, 9)]
        again = [records.event(seq, "loss", rank, started=records.BEGAN + 1 + seq * 1e-3) for seq in range(1, 9 - rank)]
        records.write_rank(tmp_path, rank, 2, [*first, *again], end=None if rank else "left")
    chromium.open(page(read_directories([tmp_path]), tmp_path / "page.html"))
    assert chromium.run(SAID).startswith("rank 0, number 8 of")
    assert chromium.run("picked") == [0, 15]


def test_click_on_key_goes_to_its_first_event(tmp_path: Path, chromium: Browser) -> None:
    chromium.open(page(read_directories([records.write(tmp_path, 2, 30)]), tmp_path / "page.html"))
    chromium.run("$('group').value = '0'; $('group').onchange()")
    chromium.run("[...document.querySelectorAll('#keys button')].find(one => one.textContent === 'snr_loss').click()")
    assert chromium.run(SAID).startswith("rank 1, number 60 of")


def test_drag_wheel_and_click_move_zoom_and_choose(tmp_path: Path, chromium: Browser) -> None:
    """A drag chooses no event."""
    chromium.open(page(read_directories([records.write(tmp_path, 4, 30)]), tmp_path / "page.html"))
    chromium.press("Escape", "0", "+", "+", "+")
    left, top = chromium.run("(box => [box.x, box.y])(canvas.getBoundingClientRect())")
    y = top + chromium.run("yOf(1)")
    before, span = chromium.run("view.from"), chromium.run(SPAN)
    chromium.drag((left + 600, y), (left + 650, y), (left + 700, y))
    assert chromium.run("view.from") == pytest.approx(before - 100 / chromium.run("width()") * span)
    assert chromium.run("picked") is None
    assert chromium.run(SPAN) == pytest.approx(span)
    at = f"view.from + (600 - GUTTER) / width() * ({SPAN})"
    under = chromium.run(at)
    chromium.wheel((left + 600, y), -200)
    assert chromium.run(SPAN) < 0.7 * span
    assert chromium.run(at) == pytest.approx(under)  # what is under the pointer stays there
    chromium.wheel((left + 600, y), 200)
    assert chromium.run(SPAN) == pytest.approx(span)
    chromium.press("0")
    event = chromium.run("nearest(1, 0.03)")
    chromium.drag((left + chromium.run(f"xOf(lanes[1].time[{event}])"), y))
    assert chromium.run("picked") == [1, event]
    assert chromium.run(SAID).startswith(f"rank 1, number {event + 1} of")


def test_buttons_zoom_and_group_filter_hides_events(tmp_path: Path, chromium: Browser) -> None:
    for rank in range(2):
        events = [records.event(seq, "loss", rank, group=name) for seq in range(1, 11) for name in ("0", "1")]
        records.write_rank(tmp_path, rank, 2, events)
    chromium.open(page(read_directories([tmp_path]), tmp_path / "page.html"))
    whole = chromium.run(SPAN)
    chromium.click("#in")
    assert chromium.run(SPAN) == pytest.approx(0.6 * whole)
    chromium.click("#out")
    assert chromium.run(SPAN) == pytest.approx(whole)
    chromium.click("#in")
    chromium.click("#fit")
    assert chromium.run(SPAN) == pytest.approx(whole)
    assert chromium.run("[...$('group').options].map(one => one.text)")[0] == "all groups"
    chromium.run("$('group').value = '1'; $('group').dispatchEvent(new Event('change'))")
    assert chromium.run("document.querySelector('#shown').textContent") == "20 of 40 events"
    assert chromium.run("[...lanes[0].shown].every(event => calls[lanes[0].call[event]].group === 1)") is True


@pytest.mark.nightly
def test_page_of_2_million_events_opens(tmp_path: Path, chromium: Browser) -> None:
    """20 ranks with 100,000 events each, about what their records hold."""
    small = read_directories([records.write(tmp_path, 2, 20, parts=False)])
    events = tuple(
        records.event(seq, ("loss", "acc")[seq % 2], started=records.BEGAN + seq * 1e-5) for seq in range(100_000)
    )
    ranks = [replace(small.records[0], rank=rank, events=events) for rank in range(20)]
    marks = [Mark("sentinel", "a gradient is far from normal", records.BEGAN + 0.5, 3, (7,))]
    recorded = small._replace(records=ranks, marks=marks)
    began = time.monotonic()
    chromium.open(page(recorded, tmp_path / "page.html"))
    assert chromium.run("document.querySelector('#shown').textContent") == "2,000,000 events"
    assert chromium.run("lanes[picked[0]].rank") == 7  # at the mark
    assert abs(chromium.run("lanes[picked[0]].time[picked[1]]") - 0.5) < 1e-4
    assert time.monotonic() - began < 60
