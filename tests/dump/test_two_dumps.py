"""`ddpstats compare` counts the same whether it may skip equal text or, for a table, has to read every entry."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpstats.cli import main
from ddpstats.dump.compare import _two_dumps
from tests.dump.hand_made import forward, tensor, write_rank

COUNTS = {"nan_count": 0, "inf_count": 0, "first_bad": None}
MEMORY = {"device": "cpu", "stride": [1], "data_ptr": 7, "storage_offset": 0, "storage_ptr": 7, "storage_bytes": 8}
CHANGES: list[dict[str, Any]] = [
    *({}, {"data_ptr": 99}, {"Mean": 1.5000001}, {"Mean": 15.0}, {"Mean": None}, {"Mean": "nan"}, {"Max": math.inf}),
    *({"Max": True}, {"dtype": "torch.float16"}, {"shape": [1, 2]}, {"requires_grad": True}, {"md5": "00000001"}),
    *({"nan_count": 3}, {"stride": [2], "data_ptr": 5}, {"storage_offset": None, "stream": 3}, {"later": 5}),
]


def dump(path: Path, changes: Sequence[dict[str, Any]], layout: Any = "lines") -> Path:
    entries = []
    for number, change in enumerate(changes):
        memory = {**MEMORY, "data_ptr": number + len(str(path)), "storage_id": number, "stream": 0}
        leaf = {**tensor(1.0, 2.0), "md5": "00000000", **COUNTS, **memory, **change}
        entries.append((f"Torch.add.{number}.forward", forward([leaf, {"type": "int", "value": 3}], [leaf])))
    return write_rank(path, entries, layout=layout)


def compared(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    main(["compare", *map(str, words), "--json"])
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert isinstance(rank, dict)
    return rank


@pytest.mark.parametrize("mode", ["statistics", "md5"])
@pytest.mark.parametrize(("layout", "kept"), [("lines", 5), ("lines", 3000), (None, 5)])
def test_counts_and_rows_are_the_same_with_and_without_a_table(
    layout: Any,
    kept: int,
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_two_dumps, "KEPT_ROWS", kept)
    a = dump(tmp_path / "a", CHANGES * 4, layout)
    b = dump(tmp_path / "b", [{}] * len(CHANGES) * 4, layout)
    for pair in ((a, b), (b, a), (a, a)):
        whole = compared(capsys, *pair, "--mode", mode, "--csv", tmp_path / "t.csv")
        assert compared(capsys, *pair, "--mode", mode) == whole


def test_rows_that_fail_are_kept_behind_many_that_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_two_dumps, "KEPT_ROWS", 3)
    a = dump(tmp_path / "a", [{"Mean": 1.5000001}] * 20 + [{"Mean": 15.0}])
    rank = compared(capsys, a, dump(tmp_path / "b", [{}] * 21), "--mode", "statistics")
    assert (rank["unequal"], rank["over_tolerance_or_not_comparable"]) == (42, 2)
    assert len(rank["rows"]) == 5
    assert [row["name"] for row in rank["rows"] if row["name"].startswith("Torch.add.20.")] == [
        "Torch.add.20.forward.input.0",
        "Torch.add.20.forward.output.0",
    ]
