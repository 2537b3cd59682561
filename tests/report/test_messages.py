"""Messages of which only one rank has a record: whom a run waited for, and what need not be a fault."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddpstats import cli
from ddpstats.guard._events import Event
from ddpstats.testing import RankPool, run_ranks
from tests.report import records, runs

LIMIT_SEC = 60.0
ALL_ALIKE = "All ranks issued the same collectives in the same order.\n"


def report(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = cli.main(["report", str(directory)])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "rank", "tag"), [("other tag", "1", 2), ("both receive", "[01]", 0), ("one fails", "0", 0)]
)
def test_a_message_that_nobody_sent(
    how: str, rank: str, tag: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(runs.messages, 2, str(tmp_path), how, timeout_sec=LIMIT_SEC).values()
    status, text = report(tmp_path, capsys)
    assert status == 1
    head = rf"rank ({rank}) waits for a message from rank [01], which has not come \(the default group of 2 ranks\):"
    assert re.search(rf"{head}\n  rank \1: recv\(float32\[3\]\) with rank [01], tag {tag}\n", text)
    assert ("What differs: the tag." in text) == (how == "other tag")
    assert "by RuntimeError" in text
    assert ALL_ALIKE not in text


@pytest.mark.parametrize("how", ["batch", "tags crosswise", "from anybody", "objects"])
def test_legal_messages_are_not_accused(
    two_ranks: RankPool, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert two_ranks.run(runs.messages, str(tmp_path), how, timeout_sec=LIMIT_SEC).values() == ["ended"] * 2
    status, text = report(tmp_path, capsys)
    assert status == 0
    assert text.endswith(ALL_ALIKE)
    assert "among them " in text


def test_a_message_that_nobody_received_is_told_and_is_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(runs.messages, 2, str(tmp_path), "not received", timeout_sec=LIMIT_SEC).values() == ["ended"] * 2
    status, text = report(tmp_path, capsys)
    assert status == 0
    assert "rank 0: 3 collectives, among them 1 message\n  rank 1: 2 collectives\n" in text
    assert "in the same order, as far as can be told.\nrank 0: send(float32[3]) with rank 1, tag 0, at " in text
    assert "rank 1 recorded nothing that goes with it\n" in text
    assert cli.main(["report", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["assumed"]) == 1


@pytest.mark.parametrize("op", ["send", "recv"])
def test_a_rank_that_went_on_did_not_wait(op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As with a stop message that never has to come, in a program that ends by ``os._exit``."""
    for rank in (0, 1):
        events = [records.event(number, None, rank) for number in (1, 2)]
        records.write_rank(tmp_path, rank, 2, [message(1, 0, op), *events] if rank == 0 else events, end=None)
    status, text = report(tmp_path, capsys)
    assert (status, "has not" in text) == (0, False)
    assert f"rank 0: {op}(float32[1]) with rank 1, tag 0, at " in text


def message(number: int, rank: int, op: str) -> Event:
    return records.event(number, None, rank, op=op, peer=1 - rank, tag=0, group="0 (point-to-point)")


@pytest.mark.parametrize(("sent", "received", "finding"), [(3, 3, ""), (3, 2, "rank 0 sends"), (2, 3, "rank 1 waits")])
def test_of_a_run_that_was_killed(
    sent: int, received: int, finding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, (op, count) in enumerate((("send", sent), ("recv", received))):
        events = [message(number, rank, op) for number in range(1, count + 1)]
        records.write_rank(tmp_path, rank, 2, events, end=None)
    status, text = report(tmp_path, capsys)
    assert status == bool(finding)
    assert text.count("has not") == bool(finding)
    assert f"\n{finding} " in text
    assert ("its last known call was " in text or "its last message" in text) == bool(finding)
