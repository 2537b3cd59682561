"""A record begins before the first collective, and exists without one."""

from __future__ import annotations

import math
import shutil
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpstats
from ddpstats import cli
from ddpstats.guard import collective_guard
from ddpstats.guard.event import Event, MessageNumbers, Signature
from ddpstats.guard.record import read_records
from ddpstats.testing import RankPool
from tests import programs
from tests.guard.tiers import tiers
from tests.report.records import recording_of

# -- what runs on the ranks -------------------------------------------------------------------------------------------


Marks = list[list[tuple[str, tuple[int, ...]]]]


def found_first(mode: Any, directory: str) -> Marks:
    """Return the marks that the record of each rank holds before the program's first collective."""
    with collective_guard(mode, record_dir=directory):
        not_finite(f"{directory}/captures")
        ddpstats.any_rank(False)  # all have written
        marks = [[(mark.kind, mark.ranks) for mark in record.marks] for record in read_records(directory)]
        ddpstats.any_rank(False)  # none leaves before all have read
    return marks


def not_finite(captures: str) -> None:
    model = torch.nn.Linear(1, 1)
    with ddpstats.NaNCapture(captures, model=model) as capture:
        with capture.micro_batch(None):
            model(torch.full((1, 1), math.nan)).sum().backward()
        capture.check()


def made_again(directory: str) -> list[list[int]]:
    """This rank's numbers in each group of its record: it makes a group, and a second one that gets the same name.

    Each rank alone: between ranks torch 2.13 itself may hang there.
    """
    with collective_guard("record", record_dir=directory) as guard:
        for count in (3, 2):
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            for _ in range(count):
                dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
    assert sum(guard.counters.reasons.values()) == guard.counters.not_compared == 5
    record = next(record for record in read_records(directory) if record.rank == dist.get_rank())
    return [[event.seq for event in events] for events in record.events_by_group.values()]


# -- tests ------------------------------------------------------------------------------------------------------------


REDUCES = """
    import ddpstats, torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(3):
        ddpstats.reduce_stats({"loss": 1.0, **({"only": 1.0} if dist.get_rank() else {})}, per_rank={}, name="train")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("per_rank", tiers([True], [False]))
def test_program_that_only_calls_reduce_stats_leaves_a_record(
    script: Any, tmp_path: Path, per_rank: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tmp_path / "records")
    program = script(REDUCES.replace("per_rank={}", f"per_rank={per_rank}"))
    done = programs.ddpstats("run", "--nproc", "2", "--guard", "record", "--record-dir", directory, program)
    assert done.returncode == 0, done.stderr
    assert "0 collectives seen, nothing was compared: the program itself issued none while the guard" in done.stderr
    records = read_records(directory)
    assert [(record.rank, record.world_size) for record in records] == [(0, 2), (1, 2)]
    assert [[mark.kind for mark in record.marks] for record in records] == [["values"] * 3 * per_rank] * 2
    assert [record.end for record in records] == ["left", "left"]
    capsys.readouterr()
    assert cli.main(["report", directory]) == 0
    assert ("  'only' (reduction 'train'):\n    rank 1: 3 times\n" in capsys.readouterr().out) == per_rank


@pytest.mark.parametrize("mode", tiers(["record"], ["strict", "step"]))
def test_finding_before_the_first_collective_is_in_the_record(two_ranks: RankPool, mode: str, tmp_path: Path) -> None:
    marks = two_ranks.run(found_first, mode, str(tmp_path)).values()
    assert marks == [[[("nonfinite", (0, 1))]] * 2] * 2


EARLY = """
    import sys, torch, torch.distributed as dist
    from ddpstats.guard import collective_guard
    from tests.guard.test_recording import not_finite

    with collective_guard("record", record_dir=sys.argv[1]):
        not_finite(sys.argv[1] + "/captures")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
"""


def test_finding_before_there_was_a_process_group_is_in_the_record(tmp_path: Path) -> None:
    done = programs.run(["-c", textwrap.dedent(EARLY), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path)
    assert [mark.kind for mark in record.marks] == ["nonfinite"]
    assert len(record.events) == 1


def test_run_writes_no_record_where_there_are_no_ranks(script: Any, tmp_path: Path) -> None:
    directory = tmp_path / "records"
    done = programs.ddpstats("run", "--guard", "record", "--record-dir", str(directory), script("print(1)"))
    assert "0 collectives seen, nothing was compared" in done.stderr
    assert not directory.exists()


def test_group_that_was_made_again_under_its_name_is_recorded_as_another(two_ranks: RankPool, tmp_path: Path) -> None:
    """Otherwise the calls of the first would be joined with those of the second, and differences missed."""
    assert two_ranks.run(made_again, str(tmp_path)).values() == [[[1, 2, 3], [1, 2]]] * 2


@pytest.mark.parametrize("is_removed", [True, False], ids=["the directory is removed", "the older file is a directory"])
def test_file_that_cannot_be_rotated_stops_the_record_and_not_the_program(tmp_path: Path, is_removed: bool) -> None:
    directory = tmp_path / "records"
    recording = recording_of(directory, 0, 1, max_bytes=2000)
    if is_removed:
        shutil.rmtree(directory)
    else:
        (directory / "rank0.old.jsonl").mkdir()
    for steps in range(100):
        recording.note(steps=steps)
    assert recording._file == -1
    recording.close()


def test_line_with_many_numbers_is_refused_in_no_time(tmp_path: Path) -> None:
    head = '{"ddpstats": 1, "run": "run", "rank": 0, "world_size": 2, "time": 1.0}'
    (tmp_path / "rank0.jsonl").write_text(head + "\n{" + '"seq":1,' * 100_000 + '"op":1}\n')
    began = time.process_time()
    with pytest.raises(ValueError, match="line 2"):
        read_records(tmp_path)
    assert time.process_time() - began < 5


def test_messages_of_very_many_tags_are_not_numbered_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpstats.guard.event._MOST_STREAMS", 2)
    numbers = MessageNumbers()
    sends = [Event("0", 0, Signature("send"), None, 0, "", 0, peer=1, tag=tag) for tag in (1, 2, 3, 1, 3)]
    assert [numbers.next(send) for send in sends] == [1, 1, 0, 2, 0]
