"""The examples in torchmetrics' docstrings print on two and three ranks, with us, what they print there without us."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from benchmarks import suites
from tests.needs import needs

pytestmark = pytest.mark.library
needs("torchmetrics")
LEAST_EXAMPLES = 250


@cache
def printed(way: str, world_size: int, directory: Path) -> list[dict[str, list[str]]]:
    path = directory / f"{way}-{world_size}"
    ended = suites.on_ranks("torchmetrics", way, "torchmetrics_suite_runs", str(path), ranks=world_size)
    assert not any(ended.statuses), ended.stderr[-6000:]
    return [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchmetrics")


@pytest.mark.parametrize("way", suites.WITH_US)
@pytest.mark.parametrize("world_size", [2, 3])
def test_torchmetrics_own_examples_print_what_they_print_without(world_size: int, way: str, directory: Path) -> None:
    expected = printed("bare", world_size, directory)
    assert len(expected[0]) >= LEAST_EXAMPLES
    assert printed(way, world_size, directory) == expected
