"""`NaNCapture` names the rank whose own gradients were bad, however a program runs its backward pass and reduces them.

Where a collective of the program's own ran before the gradients were there, it says that the rank is not known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpstats.capture import CaptureVerdict
from ddpstats.testing import RankPool
from tests.capture import backward_runs as runs
from tests.capture.test_capture import same

slow = pytest.mark.slow
QUICK = {
    *("static graph", "reentrant checkpoint", "two passes", "gradient penalty", "DDP inside, bucket view"),
    *("hooks", "asynchronous hooks", "hooks after accumulation", "hook behind the model"),
}
NOT_SEEN = {
    *("hooks", "hooks on copies", "hooks that gather", "hooks on two groups"),
    *("hooks, inside of DDP", "hooks before the accumulating node"),
    *("hooks of the accumulating node", "hook between layers", "hook between layers, inside of DDP"),
    *("hook behind the model", "hook behind the model, inside of DDP"),
}
OWN_REDUCTION = list(runs.WAYS)[list(runs.WAYS).index("hooks") : list(runs.WAYS).index("hooks, inside of DDP")]


def assert_culprit_is_rank_1(verdict: CaptureVerdict) -> None:
    assert (verdict.kind, verdict.culprit_ranks) == ("nonfinite", (1,))
    assert "the gradients of rank 1 are not finite, before any reduction" in verdict.message
    assert any(".last." in f".{name}" for name in verdict.parameters)
    assert verdict.bundle is not None


def assert_culprit_is_unknown(verdict: CaptureVerdict) -> None:
    assert (verdict.kind, verdict.culprit_ranks, verdict.by_rank) == ("nonfinite", (), {})
    assert "the program may have reduced them" in verdict.message
    assert "Which rank they come from is not known." in verdict.message
    assert "before any reduction" not in verdict.message
    assert verdict.should_skip
    assert verdict.bundle is not None


def _cases() -> list[Any]:
    """Return each way with a NaN in the second step, and the others as slow ones."""
    cases = [(name, 1, False) for name in runs.WAYS] + [(name, 0, False) for name in runs.WAYS]
    cases += [(name, step, True) for name in OWN_REDUCTION for step in (0, 1)]
    return [pytest.param(*case, marks=() if case[0] in QUICK and case[1:] == (1, False) else slow) for case in cases]


@pytest.mark.parametrize(("name", "bad_step", "set_up_late"), _cases())
def test_culprit_is_named_or_said_to_be_unknown_and_never_wrong(
    two_ranks: RankPool, tmp_path: Path, name: str, bad_step: int, set_up_late: bool
) -> None:
    verdicts = same(two_ranks.run(runs.run, name, str(tmp_path), bad_step, set_up_late=set_up_late).values())
    assert [verdict.kind for verdict in verdicts] == ["nonfinite" if step == bad_step else "ok" for step in range(3)]
    if name in NOT_SEEN:
        assert_culprit_is_unknown(verdicts[bad_step])
    else:
        assert_culprit_is_rank_1(verdicts[bad_step])


@pytest.mark.parametrize("bad_micro", [0, 1])
def test_accumulated_gradients_that_the_program_reduces_name_the_culprit(
    two_ranks: RankPool, tmp_path: Path, bad_micro: int
) -> None:
    """Every rank's gradients are bad in the second micro-batch where those of the first are."""
    case = "hooks after accumulation", str(tmp_path), 1
    run = two_ranks.run(runs.run, *case, bad_micro=bad_micro, micro_batches=2)
    assert_culprit_is_rank_1(same(run.values())[1])


def test_backward_outside_micro_batch_is_nonfinite_not_overflow(two_ranks: RankPool, tmp_path: Path) -> None:
    verdict = same(two_ranks.run(runs.outside, str(tmp_path)).values())
    assert (verdict.kind, verdict.culprit_ranks) == ("nonfinite", ())
    assert "backward() belongs inside of micro_batch()" in verdict.message


@pytest.mark.parametrize("run", [runs.given_the_inner_module, runs.steps_in_hooks])
def test_culprit_is_named_without_ddp_or_without_grad(two_ranks: RankPool, tmp_path: Path, run: Any) -> None:
    assert same(two_ranks.run(run, str(tmp_path)).values()).culprit_ranks == (1,)


@pytest.mark.parametrize(
    ("case", "kind", "culprits"),
    [
        ("mended", "ok", ()),
        ("made", "nonfinite", (1,)),
        ("on both", "nonfinite", ()),
    ],
)
def test_hooks_that_mend_make_or_share_a_nan(
    two_ranks: RankPool, tmp_path: Path, case: str, kind: str, culprits: tuple[int, ...]
) -> None:
    verdict = same(two_ranks.run(runs.with_hooks, str(tmp_path), case).values())
    assert (verdict.kind, verdict.culprit_ranks) == (kind, culprits)


@slow
def test_a_nan_that_two_of_three_ranks_shared_has_no_culprit(three_ranks: RankPool, tmp_path: Path) -> None:
    verdict = same(three_ranks.run(runs.with_hooks, str(tmp_path), "shared").values())
    assert (verdict.kind, verdict.culprit_ranks) == ("nonfinite", ())
    assert "gradients are not finite on ranks 1, 2" in verdict.message


def test_gradients_that_hooks_may_have_reduced_are_not_kept_as_this_ranks_own(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.gradients_kept, True).values() == [None, None]
    assert two_ranks.run(runs.gradients_kept, False).values() == [6, 6]
