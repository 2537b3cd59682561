"""What a step that goes wrong again, here and there, says about the cause."""

from __future__ import annotations

import pytest

from ddpstats._rerun.attribution import Cause, attempt, cause_of, from_rank_on


@pytest.mark.parametrize(
    ("wrong_here", "wrong_there", "cause"),
    [
        ([True, False], None, Cause.TRANSIENT),
        ([[], ["layer.weight"]], True, Cause.TRANSIENT),
        ([True, True], None, Cause.UNTOLD),
        ([["layer.weight"]], [], Cause.HARDWARE),
        ([True], True, Cause.SOFTWARE_OR_DATA),
    ],
)
def test_the_cause(wrong_here: list[object], wrong_there: object, cause: Cause) -> None:
    assert cause_of(wrong_here, wrong_there) is cause


def test_the_next_ranks_are_asked_first() -> None:
    assert from_rank_on((0, 3, 5), 3) == (3, 5, 0)
    assert from_rank_on((7,), 7) == (7,)


def test_what_fails_is_told() -> None:
    def fails() -> dict[str, object]:
        raise ValueError("no")

    assert attempt(fails) == {"error": "ValueError: no"}
