"""The short ways through a comparison say what the long one says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpstats.dump.compare import _two_dumps
from ddpstats.dump.compare._comparer import EntryComparer
from ddpstats.dump.compare._rows import Mode
from ddpstats.dump.compare._two_dumps import PairedDumps, compare_dumps
from ddpstats.dump.format._files import open_rank
from tests.dump.hand_made import forward, tensor, write_rank

COUNTS = {"nan_count": 0, "inf_count": 0, "first_bad": None}
MEMORY = {"device": "cpu", "stride": [1], "data_ptr": 7, "storage_offset": 0, "storage_ptr": 7, "storage_bytes": 8}
CHANGES: list[dict[str, Any]] = [
    {},
    {"data_ptr": 99},
    {"Mean": 1.5000001},
    {"Mean": 15.0},
    {"Mean": None},
    {"Mean": "nan"},
    {"Max": math.inf},
    {"Max": True},
    {"dtype": "torch.float16"},
    {"shape": [1, 2]},
    {"requires_grad": True},
    {"md5": "00000001"},
    {"nan_count": 3},
    {"stride": [2], "data_ptr": 5},
    {"storage_offset": None, "stream": 3},
    {"later": 5},
]


def dump(path: Path, changes: Sequence[dict[str, Any]], layout: Any) -> Any:
    entries = []
    for number, change in enumerate(changes):
        where = {**MEMORY, "data_ptr": number + len(str(path)), "storage_id": number, "stream": 0}
        leaf = {**tensor(1.0, 2.0), "md5": "00000000", **COUNTS, **where, **change}
        entries.append((f"Torch.add.{number}.forward", forward([leaf, {"type": "int", "value": 3}], [leaf])))
    return open_rank(write_rank(path, entries, layout=layout))


@pytest.mark.parametrize("mode", ["statistics", "md5"])
@pytest.mark.parametrize("kept", [1, 5, 3000])
@pytest.mark.parametrize("layout", ["lines", 1, None])
def test_the_short_way_counts_like_the_long_one(
    layout: Any, kept: int, mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_two_dumps, "KEPT_ROWS", kept)
    a = dump(tmp_path / "a", CHANGES * 4, layout)
    b = dump(tmp_path / "b", [{}] * len(CHANGES) * 4, layout)
    for one, other in ((a, b), (b, a), (a, a)):
        short, long = PairedDumps(), PairedDumps()
        list(compare_dumps(one, other, EntryComparer(mode, 0.5), short, is_short=True))
        rows = list(compare_dumps(one, other, EntryComparer(mode, 0.5), long))
        for count in ("paired", "only_a", "only_b", "tensors", "unequal", "failed"):
            assert getattr(short, count) == getattr(long, count), count
        assert [row.name for row in short.rows] == [row.name for row in long.rows]
        assert short.failed == sum(row.failed for row in rows)
        for first in ("first_unequal", "first_failed"):
            row, expected = getattr(short, first), getattr(long, first)
            assert (row and row.name) == (expected and expected.name)


def test_rows_that_fail_are_kept_behind_many_that_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_two_dumps, "KEPT_ROWS", 3)
    a = dump(tmp_path / "a", [{"Mean": 1.5000001}] * 20 + [{"Mean": 15.0}], "lines")
    b = dump(tmp_path / "b", [{}] * 21, "lines")
    found = PairedDumps()
    list(compare_dumps(a, b, EntryComparer("statistics", 0.5), found, is_short=True))
    assert (found.unequal, found.failed, found.highlighted) == (42, 2, 42)
    assert [row.name for row in found.rows if row.failed] == [
        "Torch.add.20.forward.input.0",
        "Torch.add.20.forward.output.0",
    ]
    assert len(found.rows) == 5
