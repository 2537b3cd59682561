"""What the operators of older torch do not tell is noted where Python issues a collective."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed as dist

from ddpstats._observe import c10d_callers
from ddpstats.testing import RankPool
from tests.observe import caller_runs as runs


def test_reduce_ops_are_those_that_python_asked_for(two_ranks: RankPool) -> None:
    outcomes = two_ranks.run(runs.reduced_by).values()
    two_ranks.restart()  # the ranks have been told something about their torch
    assert outcomes == [
        (
            [
                ("all_reduce", "max", True),
                ("reduce", "min", True),
                ("reduce_scatter", "sum", False),
                ("all_reduce", None, False),
            ],
            True,
        )
    ] * 2  # fmt: skip


@pytest.mark.parametrize(("async_op", "is_blocking"), [(False, True), (True, False)])
def test_who_waits_is_read_off_torchs_own_function_where_its_options_do_not_say(
    async_op: bool, is_blocking: bool
) -> None:
    source = "def call(frame_of, async_op):\n    return frame_of()"
    theirs: dict[str, Any] = {}
    exec(source, vars(dist.distributed_c10d), theirs)
    ours: dict[str, Any] = {}
    exec(source, {}, ours)

    def asked() -> bool:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        return c10d_callers._is_blocking(object(), frame.f_back)

    assert theirs["call"](asked, async_op) is is_blocking
    assert ours["call"](asked, async_op) is False


def test_a_collective_that_ends_while_a_slice_does_has_not_failed(two_ranks: RankPool) -> None:
    """torch says that the wait was too short; by the time that is looked into, the collective is complete."""
    assert max(two_ranks.run(runs.waits_in_slices, 500, timeout_sec=60).values()) > 0
