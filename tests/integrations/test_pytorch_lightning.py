"""The package ``pytorch_lightning`` gets what ``lightning.pytorch`` gets: cases of `test_lightning`, with its trainers.

All of those run so with DDPSTATS_TEST_LIGHTNING=pytorch_lightning in the environment.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ddpstats.testing import RankPool
from tests.needs import ROOT, needs

needs("lightning", "torchmetrics")
same: Any = importlib.import_module("tests.integrations.test_lightning")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout_sec=60, env={same.runs.PACKAGE: "pytorch_lightning"}) as pool:
        yield pool


def test_the_trainers_are_those_of_the_other_package(ranks: RankPool) -> None:
    for name in ranks.run(packages).values():
        assert name == "pytorch_lightning.trainer.trainer"


def packages() -> str:
    runs: Any = importlib.import_module("tests.integrations.lightning_runs")
    return str(runs.pl.Trainer.__module__)


def test_stock_averages_one_key_into_another(ranks: RankPool) -> None:
    same.test_stock_averages_one_key_into_another(ranks)


@pytest.mark.parametrize("how", same.WAYS)
@pytest.mark.parametrize(
    "case",
    [
        same.test_keys_that_differ_between_ranks,
        same.test_batch_sizes,
        same.test_callbacks_agree_on_a_key_of_one_rank,
        same.test_several_loaders,
        same.test_conflicts_are_errors_on_every_rank,
    ],
    ids=lambda case: case.__name__,
)
def test_as_in_the_other(ranks: RankPool, case: Any, how: str) -> None:
    case(ranks, how)


def test_a_rank_validates_longer(ranks: RankPool) -> None:
    same.test_ranks_with_different_numbers_of_batches(ranks, "install", 2)


@pytest.mark.parametrize(("hidden", "there"), [("lightning", "pytorch_lightning"), ("pytorch_lightning", "lightning")])
def test_one_of_the_two_is_enough_under_either_name(hidden: str, there: str) -> None:
    code = (
        f"import sys; sys.modules[{hidden!r}] = None\n"
        f"import ddpstats.integrations as ours; print(ours.install({hidden!r}))\n"
        "from ddpstats.integrations.lightning import DdpstatsCallback, DdpstatsNaNCapture, _patches\n"
        f"import {there} as there\n"
        "callback = getattr(there, 'pytorch', there).Callback\n"
        "assert issubclass(DdpstatsCallback, callback) and issubclass(DdpstatsNaNCapture, callback)\n"
        "print(*_patches); print(ours.uninstall())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"patched: lightning\n{there}\nrestored: lightning\n"


def test_what_one_of_the_two_lacks_is_said_and_the_other_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    result: Any = importlib.import_module("pytorch_lightning.trainer.connectors.logger_connector.result")
    monkeypatch.setattr(result._ResultCollection, "_get_cache", lambda result_metric: None)
    with pytest.warns(UserWarning, match=r"integrations\.pytorch_lightning: .* has _ResultCollection\._get_cache"):
        same.ours.install()
    assert {library: patches.installed for library, patches in same.ours._patches.items()} == {
        "lightning": True,
        "pytorch_lightning": False,
    }
    same.ours.uninstall()
