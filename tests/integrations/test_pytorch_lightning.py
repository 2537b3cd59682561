"""The package ``pytorch_lightning`` gets what ``lightning.pytorch`` gets: cases of `test_lightning`, with its trainers.

All of those run so with DDPSTATS_TEST_LIGHTNING=pytorch_lightning in the environment.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from ddpstats.testing import RankPool
from tests import programs
from tests.needs import ROOT, needs

pytestmark = pytest.mark.library
needs("lightning", "torchmetrics")
lightning: Any = importlib.import_module("tests.integrations.test_lightning")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout_sec=60, env={lightning.runs.PACKAGE: "pytorch_lightning"}) as pool:
        yield pool


def packages() -> str:
    runs: Any = importlib.import_module("tests.integrations.lightning_runs")
    return str(runs.pl.Trainer.__module__)


@pytest.mark.parametrize("how", lightning.WAYS)
def test_keys_and_conflicts_are_as_with_the_other_package(ranks: RankPool, how: str) -> None:
    assert ranks.run(packages).values() == ["pytorch_lightning.trainer.trainer"] * 2
    lightning.test_keys_that_differ_between_ranks_are_on_every_rank(ranks, how)
    lightning.test_callbacks_agree_on_a_key_of_one_rank(ranks, how)
    lightning.test_ranks_may_validate_different_numbers_of_batches(ranks, how, 2)
    lightning.test_conflicts_are_the_same_error_on_every_rank(ranks, "two reductions", 0, how)


@pytest.mark.parametrize(
    ("hidden", "installed"), [("lightning", "pytorch_lightning"), ("pytorch_lightning", "lightning")]
)
def test_one_of_the_two_packages_is_enough_under_either_name(hidden: str, installed: str) -> None:
    code = (
        f"import sys, warnings; sys.modules[{hidden!r}] = None; warnings.simplefilter('ignore')\n"
        f"import ddpstats.integrations as ours; print(ours.install({hidden!r}))\n"
        "from ddpstats.integrations.lightning import DdpstatsCallback, DdpstatsNaNCapture\n"
        f"import {installed} as library\n"
        "callback = getattr(library, 'pytorch', library).Callback\n"
        "assert issubclass(DdpstatsCallback, callback) and issubclass(DdpstatsNaNCapture, callback)\n"
        "print(ours.uninstall())"
    )
    done = programs.run(["-c", code], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "patched: lightning\nrestored: lightning\n"
