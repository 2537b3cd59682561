"""All is well only where all was compared: what the report says of records that hold less, as text and on its page."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from ddpstats import cli
from ddpstats.guard._records import RecordWriter, read_records
from tests.report import records
from tests.report.test_flight_recorder import dump, entry

ALL_ALIKE = "All ranks issued the same collectives in the same order."


def many(directory: Path, ranks: int, *, parts: bool) -> None:
    """Three times as much as a record holds."""
    for rank in range(ranks):
        labels = ["snr_loss" if parts and (rank, seq) == (1, 795) else "loss" for seq in range(1, 801)]
        events = (records.event(seq, label, rank) for seq, label in enumerate(labels, 1))
        records.write_rank(directory, rank, 2, events, max_bytes=60_000)


def test_a_mismatch_shows_after_its_groups_description_was_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many(tmp_path, 2, parts=True)
    assert min(event.seq for event in read_records(tmp_path)[0].events) > 400  # cut at least twice
    assert cli.main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "the default group of 2 ranks do not run the same collective (number 795 of this group)" in said
    assert ALL_ALIKE not in said


def test_a_rank_without_a_record_shows_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many(tmp_path, 1, parts=False)
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "rank 1: wrote no record" in capsys.readouterr().out


def test_ranks_that_agree_still_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many(tmp_path, 2, parts=False)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert ALL_ALIKE in capsys.readouterr().out


def test_descriptions_never_fill_a_record(tmp_path: Path) -> None:
    """A program that makes a group in each step."""
    writer = RecordWriter(tmp_path, 0, 1, "run", 20_000)
    for number in range(1000):
        writer.write({"new_group": str(number), "words": "a group", "ranks": [0]})
        writer.write_event(records.event(1, "loss", group=str(number)))
    writer.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    (record,) = read_records(tmp_path)
    assert len(record.events) > 10
    assert {event.group for event in record.events} <= set(record.groups)


@pytest.mark.parametrize("parts", [True, False])
def test_a_group_that_nobody_describes_is_compared_and_told(
    parts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        content = dump(entry(1), entry(2, size=5 + (rank if parts else 0)))
        content.pop("pg_config")
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))
    assert cli.main(["report", str(tmp_path)]) == parts
    said = capsys.readouterr().out
    assert ("What differs: the shape." in said) == parts
    assert "group '0': nothing tells which ranks belong to it; ranks 0, 1, which used it, were compared" in said
    assert ALL_ALIKE not in said
    (tmp_path / "nccl_trace_rank_1").unlink()
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "not compared: group '0': nothing tells which ranks belong to it, and only rank 0" in capsys.readouterr().out


def test_what_a_rank_has_dropped_it_did_not_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One collective of a small group, long ago: of one rank it is still there, and of the other not."""
    for rank in range(2):
        writer = RecordWriter(tmp_path, rank, 2, "run", 40_000)
        for name in ("0", "1"):
            writer.write({"new_group": name, "words": f"group {name}", "ranks": [0, 1]})
        writer.write_event(records.event(1, None, rank, group="1"))
        for seq in range(1, 500 if rank else 60):
            writer.write_event(records.event(seq, "loss", rank))
        writer.write({"end": "left"})
        writer.close()
    assert cli.main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert re.findall(r"collective number (\d+) of (group \d)", said) == [("60", "group 0")]
