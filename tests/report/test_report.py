"""``ddpstats report`` turns records of ranks, dumps and bundles into text, JSON and a trace."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ddpstats._base.marks import Mark
from ddpstats.capture.manifest import read_manifest, write_manifest
from ddpstats.guard.event import Event, Evidence
from ddpstats.guard.record import mark_from_dict, message_pairs, read_records
from ddpstats.report import read_directories
from ddpstats.report.timeline import report_of
from ddpstats.testing import run_ranks
from tests.formats.make import NAMES
from tests.report import records, runs
from tests.report.conftest import Report

FORMATS = Path(__file__).parents[1] / "formats" / "v1"
CAPTURES = FORMATS.with_name("v2") / "captures"


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory in which two real ranks, and PyTorch's Flight Recorder, left their records."""
    directory = tmp_path_factory.mktemp("parted")
    run_ranks(runs.parted, 2, str(directory), env={"TORCH_FR_BUFFER_SIZE": "100"}).values()
    return directory


def test_text_and_json_of_real_ranks_have_the_same(parted: Path, report: Report) -> None:
    text = report(parted, status=1)
    shown = json.loads(report(parted, "--json", status=1))
    assert shown["findings"][0]["message"] in text
    assert f" of the run of {datetime.fromtimestamp(shown['began'], timezone.utc):%Y-%m-%d %H:%M:%S} UTC:" in text
    both = shown["findings"][0]["by_rank"]
    assert [both[rank]["label"] for rank in "01"] == ["l1_loss", "snr_loss"]
    assert both["0"]["source"] == "dist.all_reduce(stats[key])"
    assert "runs.py" in both["0"]["site"]
    assert [(mark["mark"], mark["step"], mark["ranks"]) for mark in shown["marks"]] == [("sentinel", 3, [1])]
    assert "sentinel on rank 1, step 3:\n  rank 1: a gradient is far from normal" in text
    missing = {(key["key"], key["used_in"]): key["missing_ranks"] for key in shown["keys"]}
    default = "the default group of 2 ranks"
    assert missing == {
        ("l1_loss", default): [1],
        ("snr_loss", default): [0],
        ("loss", default): [],
        ("loss", "reduction 'train'"): [],
        ("only", "reduction 'train'"): [0],
    }
    assert "  'only' (reduction 'train'):\n    rank 1: 1 time\n    rank 0: never\n" in text
    values = {key["used_in"]: key["by_rank"] for key in shown["keys"] if key["key"] == "loss"}["reduction 'train'"]
    assert [values[rank]["series"][0][1] for rank in "01"] == [0.0, 1.0]


def test_flight_recorder_adds_states_to_records(parted: Path) -> None:
    recorded = read_directories([parted])
    for record in recorded.records:
        spans = recorded.spans[record.rank]
        assert [event.signature.op for event in record.events] == ["all_reduce", "all_reduce"]
        assert list(spans) == [(event.group, event.started) for event in record.events]
        assert {span.state for span in spans.values()} <= {"scheduled", "started", "completed"}


def test_flight_recorder_dumps_alone_are_compared(parted: Path, tmp_path: Path, report: Report) -> None:
    for rank in range(2):
        name = f"fr_trace_rank_{rank}"
        (tmp_path / name).write_bytes((parted / name).read_bytes())
    recorded = read_directories([tmp_path])
    shown = report_of(recorded)
    assert not shown["has_findings"]  # it knows no labels: equal operations and shapes are all that it sees
    assert shown["groups"]["0"]["ranks"] == [0, 1]
    sites = [event.site for record in recorded.records for event in record.events if event.group == "0"]
    assert all("runs.py" in site for site in sites), sites
    assert "read from Flight Recorder dumps" in report(tmp_path, status=0)


def test_trace_has_arrows_between_matched_collectives(parted: Path, tmp_path: Path, report: Report) -> None:
    report(parted, "--perfetto", str(tmp_path / "trace.json"), status=1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    of = {phase: [event for event in events if event["ph"] == phase] for phase in "MXsfi"}
    assert [event["args"]["name"] for event in of["M"] if event["name"] == "thread_name"] == ["rank 0", "rank 1"]
    shown = sorted((event["tid"], event["name"]) for event in of["X"])
    assert shown == [(0, "l1_loss"), (0, "loss"), (1, "loss"), (1, "snr_loss")]
    assert [(start["id"], start["name"]) for start in of["s"]] == [(1, "0/1")]  # and no arrow where the ranks diverge
    assert {start["tid"] for start in of["s"]} | {end["tid"] for end in of["f"]} == {0, 1}
    starts = {(event["tid"], event["ts"]) for event in of["X"]}
    assert all((event["tid"], event["ts"]) in starts for event in (*of["s"], *of["f"]))
    assert sorted((event["cat"], event["tid"]) for event in of["i"]) == [("finding", 0), ("finding", 1), ("mark", 1)]


def test_rank_without_a_collective_is_in_page_and_trace(tmp_path: Path, report: Report) -> None:
    records.write_rank(tmp_path / "records", 0, 1, [])
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert "No record of collectives." in report(tmp_path / "records", "--html", page, "--perfetto", trace, status=0)
    names = [event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert names == ["ddpstats report", "rank 0"]


def test_file_named_like_a_dump_is_left_out_with_a_note(tmp_path: Path, report: Report) -> None:
    records.write(tmp_path, 2, 1, parts=False)
    (tmp_path / "metrics_rank_0.json").write_text("{}")
    assert "note: Flight Recorder dumps are left out: " in report(tmp_path, status=0)


@pytest.mark.parametrize("time", [math.inf, math.nan, -1.0])
def test_event_without_finite_time_is_refused(time: float) -> None:
    """A browser could not read it."""
    with pytest.raises(ValueError, match="not a record of a collective"):
        Event.from_dict({**records.event(1, None).as_dict(), "time": time})


def test_messages_pair_by_their_order_within_their_group(tmp_path: Path) -> None:
    """Messages of another group are others, also under equal tags, and so is one that a rank takes from any sender."""
    messages = {0: (("a", 1), ("b", 1), ("a", 1)), 1: (("b", None), ("b", 0), ("a", 0), ("a", 0))}
    for rank, peers in messages.items():
        events = []
        for number, (group, peer) in enumerate(peers):
            op, name = "recv" if rank else "send", f"{group} (point-to-point)"
            events.append(records.event(number, None, rank, op=op, group=name, peer=peer, tag=0))
        records.write_rank(tmp_path, rank, 2, events)
    assert message_pairs(read_records(tmp_path)) == [(0, 0, 1, 2), (0, 2, 1, 3)]


def test_messages_of_which_older_ones_were_dropped_are_not_compared(tmp_path: Path, report: Report) -> None:
    """The records do not say which of a rank's sends is the first of those that the other's receives still show."""
    for rank, op in enumerate(("send", "recv")):
        alike = [
            records.event(number, None, rank, op=op, peer=1 - rank, tag=0, site="a" * (1 + 30 * rank))
            for number in range(200)
        ]
        events = [
            replace(event, signature=replace(event.signature, shapes=((1 + number % 3,),)))
            for number, event in enumerate(alike)
        ]
        records.write_rank(tmp_path, rank, 2, events, max_bytes=20_000)
    text = report(tmp_path, status=1)
    assert "a message is not what its receiver expects" not in text
    assert "not compared: messages of ranks 0, 1: older ones were dropped, so they cannot be counted" in text


def test_bundles_and_dumps_become_marks(report: Report) -> None:
    places = [str(FORMATS / NAMES["records"]), str(CAPTURES), str(FORMATS / NAMES["dump"])]
    marks = json.loads(report(*places, "--json", status=1))["marks"]
    shown = sorted((mark["mark"], mark["step"], mark["ranks"]) for mark in marks)
    assert shown == [("dump", 0, [0]), ("nonfinite", 0, [0])]
    assert report(places[1], status=1).startswith("No record of collectives.\n")


def test_time_of_record_wins_over_time_of_bundle(tmp_path: Path, report: Report) -> None:
    """The bundle has whole seconds, as all had once."""
    bundle = tmp_path / "captures"
    shutil.copytree(CAPTURES, bundle)
    (directory,) = bundle.iterdir()
    manifest = replace(read_manifest(directory), created_utc="2026-01-02T20:52:55+00:00")
    write_manifest(directory, manifest)
    second = datetime.fromisoformat(manifest.created_utc).timestamp()
    mark = Mark("nonfinite", "a verdict", second + 0.2435, manifest.step, manifest.culprit_ranks)
    records.write_rank(tmp_path, 0, 1, [records.event(1, "loss")], marks=[mark])
    (shown,) = json.loads(report(tmp_path, bundle, "--json", status=1))["marks"]
    assert shown["time"] == mark.time
    assert "\n20:52:55  nonfinite on" in report(bundle, status=1)


def test_mark_is_read_as_written(tmp_path: Path) -> None:
    values = {"a": 1.0, "b": math.inf, "c": -math.inf, "d": None, "e": math.nan, "f": 1.7e308, "g": -1e302}
    mark = Mark("values", "train", 5.5, None, (), values)
    writer = records.recording_of(tmp_path, 0, 1, "run")
    writer.take_mark(mark)
    writer.take_mark(Mark("sentinel", "x" * (2 << 20)))  # no reader would take such a line
    writer.close()
    (read,) = read_records(tmp_path)[0].marks
    assert math.isnan(read.values["e"] or 0.0)
    assert {**read.values, "e": None} == {**mark.values, "e": None}
    assert (read.kind, read.text, read.time, read.step, read.ranks) == ("values", "train", 5.5, None, ())


@pytest.mark.parametrize("value", ["1e999", "1" + "0" * 400, "[1]", '"1"'])
def test_mark_whose_value_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"\$\.values"):
        mark_from_dict({"mark": "values", "time": 1.0, "values": {"loss": json.loads(value)}})


def test_equal_lines_of_different_events_are_read_independently(tmp_path: Path) -> None:
    """Evidence refers to that of the event before, so equal lines may mean unequal events."""
    names = [("a", "b"), ("a", "b"), ("c",), ("a", "b"), ("c",), ("c",)] * 3
    events = [
        records.event(seq, of[0], evidence_source=Evidence(of[0], of, outer=Evidence("o", of + of)))
        for seq, of in enumerate(names)
    ]
    records.write_rank(tmp_path, 0, 1, events)
    assert list(read_records(tmp_path)[0].events) == events


def test_page_in_missing_directory_is_an_error(tmp_path: Path, report: Report) -> None:
    records.write(tmp_path, 2, 1)
    assert "there is no directory" in report(tmp_path, "--html", str(tmp_path / "nowhere" / "x.html"), status=2)
