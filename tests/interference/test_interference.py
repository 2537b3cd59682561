"""A program that trains with all of ddpstats on has the bits and random streams of a run without it."""

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
QUICK = ("DDP", "no_sync")
NIGHTLY = (
    "DDP with a static graph, the sentinel in mode 3 with detector v3",
    *("accumulation", "no DDP, gradients reduced in hooks", "activation checkpointing", "tied parameters"),
    *("torch.compile inside of DDP", "torch.compile in place"),
)


def cases() -> list[Any]:
    """Return each program with its ways to be watched: one of them, in turn, where it is slow, and both in all."""
    params, ways = [], list(runs.WAYS)
    slow = [name for name in PROGRAMS if name not in (*QUICK, *NIGHTLY)]
    for name in PROGRAMS:
        needed = [shards_on_cpu] if name == "FSDP2" else []
        if name in QUICK:
            params.append(pytest.param(name, ways, id=name))
        elif name in NIGHTLY:
            params.append(pytest.param(name, ways, id=name, marks=[pytest.mark.nightly, *needed]))
        else:
            number = slow.index(name) % 2
            for mark, way in ((pytest.mark.slow, ways[number]), (pytest.mark.nightly, ways[1 - number])):
                params.append(pytest.param(name, [way], id=f"{name}-{way}", marks=[mark, *needed]))
    return params


@pytest.mark.parametrize(("name", "ways"), cases())
def test_parameters_and_random_streams_are_those_of_a_run_without(
    two_ranks: RankPool, tmp_path: Path, name: str, ways: list[str]
) -> None:
    two_ranks.run(runs.set_backend, "eager").values()
    outcomes = two_ranks.run(runs.compared, name, STEPS, str(tmp_path), ways=ways, timeout_sec=240)
    for comparison in outcomes.values():
        assert comparison.differences == {way: [] for way in ways}
        for did in comparison.did.values():
            assert_it_did_something(name, did)


def assert_it_did_something(name: str, did: dict[str, int]) -> None:
    models = 2 if name.startswith("two models") else 1
    bad = 0 if name.startswith("LBFGS") else models
    assert did["judged"] >= STEPS * models
    assert did["micro-batches"] >= did["judged"]
    assert did["compared"] > STEPS
    assert (did["stats reduced"], did["windows flushed"], did["dumps"]) == (STEPS, 1, len(DUMPED_STEPS))
    assert (did["bad verdicts"], did["bundles"]) == (bad, bad)


@pytest.mark.parametrize(
    ("disturb", "difference"),
    [
        (runs.draws_from_torch, "random streams after"),
        (runs.draws_from_python, "random streams after"),
        (runs.draws_from_numpy, "random streams after"),
        (runs.changes_a_bit, "parameters, buffers, optimizers"),
        (runs.leaves_a_hook, "after all: ('hooks', "),
    ],
)
def test_watcher_that_disturbs_the_program_is_seen(
    two_ranks: RankPool, tmp_path: Path, disturb: Callable[..., None], difference: str
) -> None:
    for comparison in two_ranks.run(runs.compared, "DDP", 1, str(tmp_path), disturb).values():
        for differences in comparison.differences.values():
            assert any(difference in text for text in differences), differences
