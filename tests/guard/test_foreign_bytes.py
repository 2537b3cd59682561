"""Records and messages of ranks that an attacker wrote are refused or ignored, and harm neither reader nor disk."""

from __future__ import annotations

import argparse
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats import report as report_verb
from ddpstats.errors import ConfigError, DdpstatsError
from ddpstats.guard.diagnosis import Alarm, GuardFinding, RankStatus
from ddpstats.guard.event import decode
from ddpstats.guard.notes_shm import Exchange
from tests.report.records import recording_of

HEAD = {"ddpstats": 1, "run": "x", "rank": 0, "world_size": 2, "time": 1.0}
EVENT: dict[str, Any] = {"group": "0", "seq": 1, "op": "all_reduce", "shapes": [[2]], "dtypes": ["float32"]}


def report(directory: Path) -> int:
    return report_verb.run(argparse.Namespace(directories=[directory], json=False, html=None, perfetto=None))


def lines(*entries: Any) -> bytes:
    encoded = (entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in entries)
    return b"".join(entry + b"\n" for entry in encoded)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\n", "line 1: Expecting value"),
        (b"[" * 200_000 + b"\n", "line 1: it is nested too deeply"),
        (lines(HEAD, b"\xff\xfe"), "line 2: "),
        (lines(HEAD, [1]), "line 2: Expected `object`, got `array`"),
        (lines(HEAD, b'{"op": "x", "op": "y"}'), "line 2: the key 'op' occurs twice"),
        (lines(HEAD, b'{"seq": NaN}'), "line 2: NaN is no JSON"),
        (lines(HEAD, b'{"group": "0", "op": "x", "seq": 1e999}'), "line 2: not a record of a collective: Over"),
        (lines(HEAD, {**EVENT, "shapes": [[2], [3]]}), "line 2: not a record of a collective"),
        (lines({**HEAD, "time": 10**400}), "line 1: the first line lacks a run or a time"),
        (lines({**HEAD, "rank": True}), "line 1: the first line lacks a rank or a world size"),
        (lines(HEAD, {"new_group": "0", "ranks": ["x"]}), "line 2: Expected `int`, got `str`"),
        (lines(HEAD, {"new_group": "0", "ranks": [0, 0]}), "line 2: a group that has a rank twice"),
        (lines(HEAD, {"new_group": "0", "ranks": [0], "words": 3}), "line 2: text is needed"),
        (lines(HEAD, b" " * (2 << 20)), "line 2: a line of more than 1,048,576 bytes"),
        (lines(HEAD, {"mark": "x", "time": 1e300}), "line 2: Expected `float` < 1000000000000.0 - at `$.time`"),
        (lines(HEAD, {"mark": "x", "time": 1.0, "values": {"loss": "NaN"}}), "line 2: Invalid enum value 'NaN'"),
    ],
    ids=range(16),
)
def test_malformed_record_is_refused_with_its_line(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_bytes(content)
    with pytest.raises(DdpstatsError) as caught:
        report(tmp_path)
    assert reason in str(caught.value)
    assert str(tmp_path / "rank0.jsonl") in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_record_that_is_no_regular_file_is_refused(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "rank0.jsonl")
    with pytest.raises(DdpstatsError, match=r"Not a regular file.*rank0\.jsonl"):
        report(tmp_path)
    with pytest.raises(ConfigError, match="rank 0 cannot write its record"):
        recording_of(tmp_path, 0, 1, "run")


def test_record_of_a_terabyte_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "rank0.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DdpstatsError, match=r"rank0\.jsonl: 1,099,511,627,776 bytes, and no record has more than"):
        report(tmp_path)


def test_record_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (tmp_path / "rank0.jsonl").symlink_to(precious)
    with pytest.raises(ConfigError, match="rank 0 cannot write its record"):
        recording_of(tmp_path, 0, 1)
    assert precious.read_text() == "keep me"


def test_record_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        recording_of(tmp_path, 0, 1).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "rank0.jsonl").stat().st_mode) == 0o600


def test_a_record_cannot_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = {"new_group": "0", "words": "\x1b[2Ja group", "ranks": [0, 1]}
    for rank, op in enumerate(("all_reduce", "broadcast")):
        (tmp_path / f"rank{rank}.jsonl").write_bytes(lines({**HEAD, "rank": rank}, group, {**EVENT, "op": op}))
    assert report(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "\\x1b[2Ja group" in printed
    assert "\x1b" not in printed


FINDING: dict[str, Any] = {"kind": "mismatch", "message": "", "group": "", "seq": 1, "missing": [], "culprits": []}
FINDING |= {"doubts": [], "printer": 0}
ALARM = {"group": "0", "words": "w", "ranks": [0], "overdue": True, "tentative": True, "seq": 1}
STATUS: dict[str, Any] = {"rank": 3, "events": [], "count": 1, "waits_in": None, "last": None, "left": None}
STATUS |= {"dead": False, "stack": None, "slept_sec": 0.0, "messages": [], "is_idle": False}
DEEP = b"[" * 100_000


def packed(value: Any, count: str = "1") -> bytes:
    """Return JSON in which this count replaces each 1."""
    return json.dumps(value).replace("1", count).encode()


@pytest.mark.parametrize(
    ("unpack", "payload"),
    [
        (GuardFinding.unpack, packed({**FINDING, "by_rank": {"0": {**EVENT, "seq": "x"}}})),
        (GuardFinding.unpack, packed({**FINDING, "by_rank": 3})),
        (GuardFinding.unpack, packed({**FINDING, "by_rank": {}}, "1e999")),
        (GuardFinding.unpack, DEEP),
        (Alarm.unpack, packed(ALARM, "1e999")),
        (Alarm.unpack, packed({**ALARM, "ranks": 3})),
        (Alarm.unpack, b'["0"]'),
        (Alarm.unpack, DEEP),
    ],
    ids=range(8),
)
def test_malformed_verdict_or_alarm_is_refused(unpack: Callable[[bytes], Any], payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack(payload)


@pytest.mark.parametrize(
    "payload",
    [DEEP, packed({**STATUS, "waits_in": []}), packed(STATUS, "1e999"), packed({**STATUS, "events": 3})],
    ids=["deep", "waits nowhere", "infinite", "no events"],
)
def test_malformed_status_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        RankStatus.unpack(payload)


def test_numbers_between_distant_events_are_not_counted_through() -> None:
    """Ranks compare number by number: from 1 to 10**18 that would never end."""
    status = RankStatus.unpack(packed({**STATUS, "events": [EVENT, {**EVENT, "seq": 10**18}]}))
    assert [event.seq for event in status.events] == [10**18]


@pytest.mark.parametrize("payload", [b"[" * 990, b"{}", b"3"], ids=["deep", "empty", "a number"])
def test_malformed_call_of_a_neighbour_is_ignored(payload: bytes) -> None:
    assert decode([(1, 0, payload)]) == ()


def test_shared_memory_is_readable_by_its_owner_alone() -> None:
    exchange = Exchange(HashStore(), 0, 2)
    try:
        assert exchange._shared is not None
        assert stat.S_IMODE(os.fstat(exchange._shared.file.fileno()).st_mode) == 0o600
    finally:
        exchange.close()


def test_no_field_of_a_record_begins_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged = "\nAll ranks issued the same collectives in the same order."
    for rank in range(2):
        entries = [
            {**HEAD, "rank": rank},
            {"new_group": "0", "words": f"the group{forged}", "ranks": [0, 1]},
            {"group": "0", "seq": 1, "op": f"sum{forged}", "reduce_op": f"max{forged}", "shapes": [[rank]]}
            | {"dtypes": [f"float32{forged}"], "site": f"a.py:1{forged}", "source": f"x{forged}", "time": 2.0}
            | {"pieces": f"two{forged}"},
            {"mark": f"note{forged}", "text": f"seen{forged}", "time": 2.0},
            {"end": f"Error{forged}"},
        ]
        (tmp_path / f"rank{rank}.jsonl").write_bytes(lines(*entries))
    (tmp_path / f"rank{forged}.jsonl").write_text("")
    assert report(tmp_path) == 1
    printed = capsys.readouterr().out
    assert printed.count("\\nAll ranks issued the same collectives in the same order.") > 8
    assert forged not in printed


def test_older_file_of_a_record_is_named_where_it_is_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text("")
    os.mkfifo(tmp_path / "rank0.old.jsonl")
    with pytest.raises(DdpstatsError, match=r"a pipe, a socket or a device: \S*/rank0\.old\.jsonl$"):
        report(tmp_path)
