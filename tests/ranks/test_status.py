"""Ranks tell each other what went wrong in a call, and every one of them raises the same error for it."""

from __future__ import annotations

import pytest

from ddpstats._ranks.exchange import Call, Failure, Status, are_in_step, refuse_what_is_wrong
from ddpstats.errors import ProtocolMismatch


def status(
    call: str = "reduce_stats",
    name: str | None = None,
    failure: Failure | None = None,
    stale: bool = True,
    agreed: bytes = bytes(8),
) -> Status:
    return Status(Call(call, name, "propagate"), agreed, failure, stale)


def test_ranks_that_had_not_agreed_on_the_same_are_out_of_step() -> None:
    both = [(status(stale=False), (0,)), (status(stale=False, agreed=b"another."), (1,))]
    assert not are_in_step(both)
    refuse_what_is_wrong(both, "the group")  # raises nothing: they agree anew


def test_different_calls_go_before_everything_else() -> None:
    other = status(call="any_rank", failure=Failure("", "x"))
    with pytest.raises(ProtocolMismatch, match=r"name='train'.*\n.*any_rank"):
        refuse_what_is_wrong([(status(name="train"), (0,)), (other, (1,))], "g")


def test_clean_statuses_after_unclean_lanes_are_damage() -> None:
    with pytest.raises(ProtocolMismatch, match="damaged"):
        refuse_what_is_wrong([(status(stale=False), (0, 1))], "g")
