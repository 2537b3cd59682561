"""A Flight Recorder dump is read as plain values, within limits, or refused: its pickle never runs anything."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from ddpstats.guard.record import message_pairs
from ddpstats.report import read_directories
from ddpstats.report.timeline import report_of
from tests.report import records
from tests.report.conftest import Report

PLAIN = {"a": [1, -1, 255, 1 << 40, -(1 << 70), 1.5, True, None], "b": ["x", [], ["é" * 300]], "c": {1: {}}}

SHARED: Any = "x"  # in a few bytes of pickle a list whose text would have 2**64 letters
for _ in range(64):
    SHARED = [SHARED, SHARED]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch it_ran",)


def entry(seq: int, op: str = "nccl:all_reduce", size: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "record_id": seq - 1,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "profiling_name": op,
        "time_created_ns": 1795391109_000000000 + seq * 1000,
        "time_discovered_started_ns": 1795391109_000000000 + seq * 1000 + 100,
        "time_discovered_completed_ns": 1795391109_000000000 + seq * 1000 + 600,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "frames": [
            {"name": "all_reduce", "filename": "/site-packages/torch/distributed/distributed_c10d.py", "line": 1},
            {"name": "step", "filename": "/job/train.py", "line": 7},
        ],
        **more,
    }


def dump(*entries: Any) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_of_plain_values_is_read(protocol: int, tmp_path: Path) -> None:
    group = ("0", "default_pg")
    content = dump(*(entry(seq, process_group=group, more=PLAIN) for seq in (1, 2)))
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(content, protocol))
    (record,) = read_directories([tmp_path]).records
    assert [str(event) for event in record.events] == ["all_reduce(Float[4])"] * 2


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        pickle.dumps([Evil()], 2),
        pickle.dumps(dump(entry(1, more=Evil()))),
        pickle.dumps(dump(entry(1, more=Evil())), 0),
        b"cos\nsystem\n(S'touch it_ran'\ntR.",
        b"(S'touch it_ran'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch it_ran'\no.",
        b"\x80\x02Pit_ran\n.",
        b"\x80\x02X\x06\0\0\0it_ranQ.",
        b"\x80\x02\x82\x01.",
        b"\x80\x05\x97.",
        b"\x80\x02]}b.",
        b"\x80\x02X\x06\0\0\0system)R.",
        pickle.dumps({1, 2}),
        pickle.dumps(b"bytes"),
        pickle.dumps(dump(entry(1, profiling_name=b"bytes"))),
        pickle.dumps(PLAIN)[:-1],
        b"",
        b".",
        b"\x80\x02]q\xffh\x00.",
        b"\x80\x02X\xff\xff\xff\x7fabc.",
        b"\x80\x02(t(u.",
        b"\x80\x02K\x01K\x02a.",
    ],
    ids=range(23),
)
def test_pickle_of_anything_else_is_refused(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nccl_trace_rank_0").write_bytes(data)
    assert "nccl_trace_rank_0 is no dump of the Flight Recorder" in report(tmp_path, status=2)
    assert not Path("it_ran").exists()


def test_file_above_64_mib_is_refused(tmp_path: Path, report: Report) -> None:
    with (tmp_path / "nccl_trace_rank_0").open("wb") as file:
        file.truncate((64 << 20) + 1)
    printed = report(tmp_path, status=2)
    assert "nccl_trace_rank_0 is no dump of the Flight Recorder" in printed
    assert "67,108,864 bytes" in printed


def test_mismatch_of_shape_is_found_between_pickle_and_json(tmp_path: Path) -> None:
    first, second = dump(entry(1), entry(2, size=5)), dump(entry(1), entry(2, size=6))
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(first))
    (tmp_path / "nccl_trace_rank_1.json").write_text(json.dumps(second))
    (finding,) = records.report_on(tmp_path)["findings"]
    assert (finding["seq"], finding["kind"]) == (2, "mismatch")
    assert "at /job/train.py:7 in step" in finding["message"]
    assert [finding["by_rank"][rank]["seconds"] for rank in "01"] == [5e-7] * 2


def test_entry_without_frames_has_no_call_site(tmp_path: Path, report: Report) -> None:
    for rank in range(2):
        content = dump(entry(1, frames=[]), entry(2, size=5 + rank, frames=[]))
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(content))
    text = report(tmp_path, status=1)
    assert "  rank 0: all_reduce(Float[5])\n  rank 1: all_reduce(Float[6])\n" in text
    assert "Last collective on which they agreed: number 1, all_reduce(Float[4]).\n" in text


def test_a_program_in_a_directory_called_torch_keeps_its_call_site(tmp_path: Path) -> None:
    frames = [
        {"name": "all_reduce", "filename": "/env/site-packages/torch/distributed/distributed_c10d.py", "line": 1},
        {"name": "wrapper", "filename": "/env/site-packages/torch/utils/hooks.py", "line": 2},
        {"name": "step", "filename": "/home/user/torch/train.py", "line": 7},
    ]
    for rank in range(2):
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(dump(entry(1, size=5 + rank, frames=frames))))
    (finding,) = records.report_on(tmp_path)["findings"]
    assert "at /home/user/torch/train.py:7 in step" in finding["message"]


def test_two_dumps_of_a_rank_are_refused_or_left_out_beside_records(tmp_path: Path, report: Report) -> None:
    (tmp_path / "host1").mkdir()
    for path in (tmp_path / "a_rank_0.json", tmp_path / "host1" / "b_rank_0.json"):
        path.write_text(json.dumps(dump(entry(1))))
    text = report(tmp_path, tmp_path / "host1", status=2)
    assert "are both a dump of rank 0: take one away" in text
    assert all(name in text for name in ("a_rank_0.json", "host1/b_rank_0.json"))
    records.write(tmp_path, 2, 1, parts=False)
    assert "note: Flight Recorder dumps are left out: " in report(tmp_path, tmp_path / "host1", status=0)


def test_states_and_durations_are_shown(tmp_path: Path, report: Report) -> None:
    hangs: dict[str, Any] = {"state": "started", "time_discovered_completed_ns": None}
    for rank in range(2):
        content = dump(entry(1), entry(2, size=5 + rank, **(hangs if rank else {})))
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))
    text = report(tmp_path, status=1)
    assert "rank 0: 2 collectives; the Flight Recorder saw 2 completed\n" in text
    assert "rank 1: 2 collectives; the Flight Recorder saw 1 completed, 1 started\n" in text
    assert "The Flight Recorder saw it as:\n  rank 0: completed, 0.0005 ms\n  rank 1: started\n" in text
    shown = json.loads(report(tmp_path, "--json", status=1))
    assert [rank["states"] for rank in shown["ranks"]] == [{"completed": 2}, {"completed": 1, "started": 1}]
    by_rank = shown["findings"][0]["by_rank"]
    assert [(by_rank[rank]["state"], by_rank[rank]["seconds"]) for rank in "01"] == [
        ("completed", 5e-7),
        ("started", None),
    ]


def test_first_of_coalesced_calls_stands_for_all(tmp_path: Path) -> None:
    coalesced = [entry(1), entry(1), entry(2)]
    for rank, op in ((0, "nccl:send 0->1"), (1, "nccl:recv 1<-0")):
        content = dump(*coalesced, entry(3, op, p2p_seq_id=1, is_p2p=True))
        (tmp_path / f"trace_rank_{rank}").write_bytes(pickle.dumps(content))
    recorded = read_directories([tmp_path])
    assert report_of(recorded)["findings"] == []
    assert message_pairs(recorded.records) == [(0, 2, 1, 2)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x80\x04N.", "has no entries"),
        (b"{}", "has no entries"),
        (b"{", "Expecting"),
        (pickle.dumps(dump({})), "KeyError('process_group')"),
        (pickle.dumps(dump(entry(1, time_created_ns=-1))), "no time"),
        (
            json.dumps(dump(entry(1, time_discovered_completed_ns=7e307))).replace("7e+307", "1e400").encode(),
            "infinity",
        ),
        (pickle.dumps(dump(entry(1, frames=[7]))), "TypeError"),
        (pickle.dumps(dump(entry(1, profiling_name=SHARED))), "text is needed, not list"),
        (pickle.dumps(dump(Evil())), "more than plain values"),
        (
            b"\x80\x02}X\x07\0\0\0entries]}X\r\0\0\0process_group" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"sas.",
            "text is needed, not list",
        ),
    ],
    ids=range(10),
)
def test_file_that_is_no_dump_is_named_with_the_reason(
    content: bytes, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nccl_trace_rank_0").write_bytes(content)
    printed = report(tmp_path, status=2)
    assert "nccl_trace_rank_0 is no dump of the Flight Recorder" in printed
    assert text in printed
    assert not Path("it_ran").exists()


def test_dump_of_full_recorder_is_read(tmp_path: Path) -> None:
    entries = json.loads(json.dumps([entry(seq) for seq in range(1, 2_001)]))
    for rank, content in enumerate((pickle.dumps(dump(*entries), 2), json.dumps(dump(*entries)).encode())):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(content)
    assert [len(spans) for spans in read_directories([tmp_path]).spans.values()] == [2_000, 2_000]
