"""The demonstration models in Lightning's wheel end on two ranks, with us, as they end without: weights and values."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suites
from tests.needs import needs

pytestmark = pytest.mark.library
needs("lightning")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@cache
def ends(model: str, way: str, directory: Path) -> list[Any]:
    path = directory / f"{model}-{way}"
    ended = suites.on_ranks("lightning", way, "lightning_suite_runs", model, str(path), ranks=2)
    assert not any(ended.statuses), ended.stderr[-6000:]
    return [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", suites.WITH_US)
@pytest.mark.parametrize("model", ["BoringModel", "ManualOptimBoringModel"])
def test_lightnings_own_models_end_as_they_end_without(model: str, way: str, directory: Path) -> None:
    expected, ended = ends(model, "bare", directory), ends(model, way, directory)
    for alone, with_us in zip(expected, ended, strict=True):
        assert with_us["weights"] == alone["weights"]
        assert with_us["steps"] == alone["steps"]
        assert with_us["logged"] == pytest.approx(alone["logged"], rel=1e-6)  # ours are sums of float64
