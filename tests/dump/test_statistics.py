"""A new statistic is one row of a table: recording, reading and both verbs go by it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddpstats import DumpError
from ddpstats.dump.analyze import DumpEntry
from ddpstats.dump.statistics import STATISTICS, Statistic
from tests.dump.collecting import dumped
from tests.dump.verbs import compare


@pytest.fixture
def spread() -> Iterator[str]:
    """A statistic that the package does not have."""
    row = Statistic("Spread", measure=lambda values: values.max() - values.min())
    STATISTICS.append(row)
    yield row.key
    STATISTICS.remove(row)


@pytest.mark.parametrize("is_on_device", [False, True])
def test_new_statistic_is_recorded(
    spread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_device: bool
) -> None:
    monkeypatch.setattr("ddpstats.dump.record.leaves._is_on_host", lambda values: not is_on_device)
    many = torch.arange(100.0)

    def body() -> None:
        for tensor in (many, many.view(10, 10).t(), many[:3], many[2:3].expand(4, 1), many.long(), many > 3):
            tensor.clone()

    entries = dumped(tmp_path, body, statistics={"list": ["Tensor.clone"], "data_mode": ["input"]})
    leaves = [entry["input_args"][0] for entry in entries.values()]
    assert [leaf[spread] for leaf in leaves] == [99.0, 99.0, 2.0, 0.0, 99.0, 1.0]
    assert list(leaves[0])[3:9] == ["Max", "Min", "Mean", "Norm", spread, "requires_grad"]


def test_new_statistic_is_compared(spread: str, tmp_path: Path) -> None:
    for run, end in (("a", 4.0), ("b", 5.0)):
        dumped(tmp_path / run, lambda end=end: torch.tensor([1.0, 2.0, end]).exp())  # type: ignore[misc]
    table = tmp_path / "table.csv"
    status, text = compare(tmp_path / "a", tmp_path / "b", "--csv", table)
    assert status == 1
    assert re.search(r"\n +Max +Min +Mean +Norm +Spread\n +A .*\n +B .*\n +relative  0.6321 +0 .* 0.6439\n", text), text
    assert ", Spread 0.6439\n" in text
    assert {"Spread diff", "SpreadRelativeErr", "NPU spread", "Bench spread"} <= {*table.read_text().split(",")}


def test_new_statistic_is_read_and_described(spread: str) -> None:
    leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [], spread: 2.0}
    assert [row.text(leaf) for row in STATISTICS if row.text(leaf)] == ["Spread 2"]
    with pytest.raises(DumpError, match="Spread: 'wide' is not a number"):
        list(DumpEntry("Torch.add.0.forward", {"output": [{**leaf, spread: "wide"}]}).leaves())
