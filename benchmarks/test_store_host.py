"""Guards, checks of a step and bundles raise `RankMissing` where the rank that serves the store is killed.

The reductions are in `tests/ranks/test_store_host.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import store_host_runs as runs
from ddpstats.testing import run_ranks
from tests.programs import reserved_port
from tests.ranks.store_host_runs import LIMIT_SEC, LOST_STORE, Survivor, check


def survivors_of(function: Callable[..., Survivor], *args: Any) -> list[Survivor]:
    """Run on three ranks of which rank 0 dies, and return what ranks 1 and 2 say."""
    with reserved_port() as port:
        outcomes = run_ranks(function, 3, port, *args, timeout_sec=150.0)
    assert outcomes[0].exit_code == -9
    assert [outcome.error for outcome in outcomes[1:]] == [None, None], outcomes
    return [outcome.value for outcome in outcomes[1:]]


@pytest.mark.parametrize("phase", ["before", "between"])
def test_checks_of_step_after_death_of_store_host_are_rank_missing(phase: str, tmp_path: Path) -> None:
    check(survivors_of(runs.lose_rank_0_of_checks, phase, "", str(tmp_path)))


@pytest.mark.parametrize("name", ["NaNCapture.check", "Sentinel.step", "gather_trees"])
def test_check_of_step_during_death_of_store_host_is_rank_missing(name: str, tmp_path: Path) -> None:
    check(survivors_of(runs.lose_rank_0_of_checks, "during", name, str(tmp_path)))


@pytest.mark.parametrize(
    ("where", "complete"), [("new_directory", []), ("write_part", [False]), ("write_manifest", [True])]
)
def test_bundle_is_complete_only_if_store_host_died_after_its_part(
    where: str, complete: list[bool], tmp_path: Path
) -> None:
    check(survivors_of(runs.lose_rank_0_in_bundle, where, str(tmp_path)))
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("*/MANIFEST.json")]
    assert [manifest["complete"] for manifest in manifests] == complete


@pytest.mark.parametrize("mode", ["strict", "step"])
@pytest.mark.parametrize("name", sorted(runs.GUARDED))
def test_guarded_call_after_death_of_store_host_is_rank_missing(name: str, mode: str) -> None:
    """Each rank concludes by itself, so texts may differ; all name the rank."""
    survivors = survivors_of(runs.lose_rank_0_under_guard, mode, name)
    for survivor in survivors:
        for attempt in (survivor.first[name], survivor.again[name]):
            assert attempt.raised == "RankMissing", attempt
            if name != "recv from any rank":  # any other rank might still send
                assert attempt.missing == [0], attempt
                assert any(text in attempt.text for text in LOST_STORE), attempt
            assert attempt.after_sec < LIMIT_SEC, attempt
        assert survivor.left == []
