"""A message that only one rank recorded is a finding where a run waited for it, and a note otherwise."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ddpstats.guard.event import Event
from ddpstats.report import read_directories
from ddpstats.testing import RankPool, run_ranks
from tests.report import records, runs
from tests.report.browser import Browser
from tests.report.conftest import Report
from tests.report.test_page import page

LIMIT_SEC = 60.0
ALL_ALIKE = "All ranks issued the same collectives in the same order.\n"


@pytest.mark.parametrize(
    ("how", "rank", "tag"), [("other tag", "1", 2), ("both receive", "[01]", 0), ("one fails", "0", 0)]
)
def test_message_without_sender_is_a_finding(how: str, rank: str, tag: int, tmp_path: Path, report: Report) -> None:
    run_ranks(runs.messages, 2, str(tmp_path), how, timeout_sec=LIMIT_SEC).values()
    text = report(tmp_path, status=1)
    head = rf"rank ({rank}) waits for a message from rank [01], which has not come \(the default group of 2 ranks\):"
    assert re.search(rf"{head}\n  rank \1: recv\(float32\[3\]\) from rank [01], tag {tag}\n", text)
    assert ("What differs: the tag." in text) == (how == "other tag")
    assert "by RuntimeError" in text
    assert ALL_ALIKE not in text


@pytest.mark.parametrize("how", ["batch", "tags crosswise", "from anybody", "objects"])
def test_legal_messages_are_no_finding(two_ranks: RankPool, how: str, tmp_path: Path, report: Report) -> None:
    assert two_ranks.run(runs.messages, str(tmp_path), how, timeout_sec=LIMIT_SEC).values() == ["ended"] * 2
    text = report(tmp_path, status=0)
    assert text.endswith(ALL_ALIKE)
    assert "among them " in text


def test_message_without_receiver_is_a_note(tmp_path: Path, report: Report) -> None:
    assert run_ranks(runs.messages, 2, str(tmp_path), "not received", timeout_sec=LIMIT_SEC).values() == ["ended"] * 2
    text = report(tmp_path, status=0)
    assert "rank 0: 3 collectives, among them 1 message\n  rank 1: 2 collectives\n" in text
    assert "Nothing differs in what could be compared.\nrank 0: send(float32[3]) to rank 1, tag 0, at " in text
    assert "rank 1 recorded nothing that goes with it\n" in text
    assert len(json.loads(report(tmp_path, "--json", status=0))["assumed"]) == 1


@pytest.mark.slow
def test_finding_about_a_message_leads_to_its_events(tmp_path: Path, chromium: Browser) -> None:
    for rank, op in enumerate(("send", "recv")):
        dtype = replace(message(1, rank, op).signature, dtypes=(("float32", "float64")[rank],))
        events = [records.event(1, None, rank), replace(message(2, rank, op), signature=dtype)]
        records.write_rank(tmp_path, rank, 2, events)
    chromium.open(page(read_directories([tmp_path]), tmp_path / "page.html"))
    assert "What differs: the dtype." in chromium.run("findings[0].message")
    assert chromium.run("findings[0].at") == {"0": 1, "1": 1}


@pytest.mark.parametrize("op", ["send", "recv"])
def test_unmatched_message_of_rank_that_went_on_is_a_note(op: str, tmp_path: Path, report: Report) -> None:
    """As with a stop message that never has to come, in a program that ends by ``os._exit``."""
    for rank in (0, 1):
        events = [records.event(number, None, rank) for number in (1, 2)]
        records.write_rank(tmp_path, rank, 2, [message(1, 0, op), *events] if rank == 0 else events, end=None)
    text = report(tmp_path, status=0)
    assert "has not" not in text
    assert f"rank 0: {op}(float32[1]) {'to' if op == 'send' else 'from'} rank 1, tag 0, at " in text


def message(number: int, rank: int, op: str) -> Event:
    return records.event(number, None, rank, op=op, peer=1 - rank, tag=0, group="0 (point-to-point)")


@pytest.mark.parametrize(
    ("sent", "received", "finding", "last"),
    [
        (3, 3, "", ()),
        (3, 2, "rank 0 sends", ("its last known collective was ",)),
        (2, 3, "rank 1 waits", ("its last message",)),
    ],
)
def test_unmatched_last_message_of_killed_run_is_a_finding(
    sent: int, received: int, finding: str, last: tuple[str, ...], tmp_path: Path, report: Report
) -> None:
    for rank, (op, count) in enumerate((("send", sent), ("recv", received))):
        events = [message(number, rank, op) for number in range(1, count + 1)]
        records.write_rank(tmp_path, rank, 2, events, end=None)
    text = report(tmp_path, status=int(bool(finding)))
    assert text.count("has not") == bool(finding)
    assert f"\n{finding} " in text
    assert tuple(words for words in ("its last known collective was ", "its last message") if words in text) == last
