"""Training with all of ddpstats is training without it: to the bit, whatever the program is like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpstats.testing import RankPool
from tests.capabilities import shards_on_cpu
from tests.interference import runs
from tests.interference.programs import PROGRAMS
from tests.interference.watching import DUMPED_STEPS

STEPS = 5
MARKS = {"FSDP2": shards_on_cpu}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in PROGRAMS])
def test_parameters_and_random_streams_are_those_of_a_run_without(
    two_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    two_ranks.run(runs.set_backend, "eager").values()
    for told in two_ranks.run(runs.compared, name, STEPS, str(tmp_path), timeout_sec=240).values():
        assert told.differences == {way: [] for way in runs.WAYS}
        for did in told.did.values():
            assert_it_did_something(name, did)


def assert_it_did_something(name: str, did: dict[str, int]) -> None:
    models = 2 if name.startswith("two models") else 1
    bad = 0 if name.startswith("LBFGS") else models
    assert did["judged"] >= STEPS * models
    assert did["micro-batches"] >= did["judged"]
    assert did["compared"] > STEPS
    assert (did["stats reduced"], did["windows flushed"], did["dumps"]) == (STEPS, 1, len(DUMPED_STEPS))
    assert (did["NaN told"], did["bundles"]) == (bad, bad)


@pytest.mark.parametrize(
    ("meddle", "heard"),
    [
        (runs.draws_from_torch, "random streams after"),
        (runs.draws_from_python, "random streams after"),
        (runs.draws_from_numpy, "random streams after"),
        (runs.changes_a_bit, "parameters, buffers, optimizers"),
        (runs.leaves_a_hook, "after all: ('hooks', "),
    ],
)
def test_what_disturbs_a_program_is_seen(
    two_ranks: RankPool, tmp_path: Path, meddle: Callable[..., None], heard: Any
) -> None:
    for told in two_ranks.run(runs.compared, "DDP", 1, str(tmp_path), meddle).values():
        for said in told.differences.values():
            assert any(heard in one for one in said), said
