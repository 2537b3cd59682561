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
MODELS = ("BoringModel", "ManualOptimBoringModel")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@cache
def ends(way: str, directory: Path) -> list[Any]:
    path = directory / way
    ended = suites.on_ranks("lightning", way, "lightning_suite_runs", str(path), *MODELS, ranks=2)
    assert not any(ended.statuses), ended.stderr[-6000:]
    return [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", suites.WITH_US)
def test_lightnings_own_models_end_as_they_end_without(way: str, directory: Path) -> None:
    for expected, ended in zip(ends("bare", directory), ends(way, directory), strict=True):
        assert set(expected) == set(ended) == set(MODELS)
        for model in MODELS:
            alone, with_us = expected[model], ended[model]
            assert with_us["weights"] == alone["weights"]
            assert with_us["steps"] == alone["steps"] > 0
            assert with_us["logged"] == pytest.approx(alone["logged"], rel=1e-6)  # ours are sums of float64
