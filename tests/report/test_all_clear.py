"""The report says that all is well only where everything was compared."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from ddpstats.guard.record import read_records
from tests.report import records
from tests.report.conftest import Report
from tests.report.test_flight_recorder import dump, entry

ALL_ALIKE = "All ranks issued the same collectives in the same order."


def many(directory: Path, ranks: int, *, parts: bool) -> None:
    """Three times as much as a record holds."""
    for rank in range(ranks):
        labels = ["snr_loss" if parts and (rank, seq) == (1, 795) else "loss" for seq in range(1, 801)]
        events = (records.event(seq, label, rank) for seq, label in enumerate(labels, 1))
        records.write_rank(directory, rank, 2, events, max_bytes=60_000)


@pytest.mark.parametrize(
    ("ranks", "parts", "text"),
    [
        (2, True, "the default group of 2 ranks do not run the same collective (number 795 of this group)"),
        (1, False, "rank 1: wrote no record"),
        (2, False, ALL_ALIKE),
    ],
    ids=["mismatch", "missing record", "agreement"],
)
def test_verdict_after_description_of_group_was_dropped(
    ranks: int, parts: bool, text: str, tmp_path: Path, report: Report
) -> None:
    many(tmp_path, ranks, parts=parts)
    assert min(event.seq for event in read_records(tmp_path)[0].events) > 400  # cut at least twice
    printed = report(tmp_path, status=text != ALL_ALIKE)
    assert text in printed
    assert (ALL_ALIKE in printed) == (text == ALL_ALIKE)


def test_descriptions_of_groups_never_fill_a_record(tmp_path: Path) -> None:
    """A program that makes a group in each step."""
    writer = records.recording_of(tmp_path, 0, 1, "run", 20_000)
    for number in range(1000):
        writer.write({"new_group": str(number), "words": "a group", "ranks": [0]})
        writer.write(records.event(1, "loss", group=str(number)).as_dict())
    writer.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    (record,) = read_records(tmp_path)
    assert len(record.events) > 10
    assert {event.group for event in record.events} <= set(record.groups)


@pytest.mark.parametrize("parts", [True, False])
def test_group_without_description_is_compared_with_a_note(parts: bool, tmp_path: Path, report: Report) -> None:
    for rank in range(2):
        content = dump(entry(1), entry(2, size=5 + (rank if parts else 0)))
        content.pop("pg_config")
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))
    text = report(tmp_path, status=parts)
    assert ("What differs: the shape." in text) == parts
    assert "group '0': no record says which ranks belong to it; ranks 0, 1, which used it, were compared" in text
    assert ALL_ALIKE not in text
    (tmp_path / "nccl_trace_rank_1").unlink()
    assert "not compared: group '0': no record says which ranks belong to it, and only rank 0" in report(
        tmp_path, status=1
    )


def test_dropped_collective_is_not_missing(tmp_path: Path, report: Report) -> None:
    """One rank's record still has the only collective of a small group, and the other's has dropped it."""
    for rank in range(2):
        writer = records.recording_of(tmp_path, rank, 2, "run", 40_000)
        for name in ("0", "1"):
            writer.write({"new_group": name, "words": f"group {name}", "ranks": [0, 1]})
        writer.write(records.event(1, None, rank, group="1").as_dict())
        for seq in range(1, 500 if rank else 60):
            writer.write(records.event(seq, "loss", rank).as_dict())
        writer.write({"end": "left"})
        writer.close()
    text = report(tmp_path, status=1)
    assert re.findall(r"collective number (\d+) of (group \d)", text) == [("60", "group 0")]
