"""However a program runs its backward pass: the rank whose own gradients were bad is named, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpstats.testing import RankPool
from tests.capture import backward_runs as runs


@pytest.mark.parametrize("bad_step", [0, 1])
@pytest.mark.parametrize("name", runs.CASES)
def test_the_culprit(two_ranks: RankPool, tmp_path: Path, name: str, bad_step: int) -> None:
    first, second = two_ranks.run(runs.run, name, str(tmp_path), bad_step).values()
    assert first == second
    assert [verdict.kind for verdict in first] == ["nonfinite" if step == bad_step else "ok" for step in range(3)]
    assert first[bad_step].culprit_ranks == (1,)
    assert any(one.endswith("first.weight") for one in first[bad_step].parameters)


def test_the_module_inside_is_recognized(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.given_the_inner_module, str(tmp_path)).values()
    assert first == second
    assert first[0].culprit_ranks == (1,)


def test_what_nobody_saw_is_not_called_an_overflow(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.outside, str(tmp_path)).values()
    assert first == second
    assert (first[0].kind, first[0].culprit_ranks) == ("nonfinite", ())
    assert "backward() belongs inside of micro_batch()" in first[0].message


def test_gradients_that_are_gone_at_once(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(runs.steps_in_hooks, str(tmp_path)).values()
    assert first == second
    assert first[0].culprit_ranks == (1,)
