"""A rank that is cut off from the host of the store raises `RankMissing` within its timeout, and so do the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hosts import Hosts
from tests.ranks.store_host_runs import Attempt
from tests.ranks.two_hosts import (
    KILLED_AFTER_SEC,
    LIMIT_SEC,
    TIMEOUT_SEC,
    killed_at_end,
    lose_link,
    start_rank,
)

# `benchmarks/test_two_hosts.py` has the other phases of a link that goes down, bad links, and the guard.
pytestmark = pytest.mark.slow


def test_link_that_goes_down_between_reductions_is_rank_missing_on_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    function = "tests.ranks.two_hosts:reduce_before_and_after"
    (near, near_again), (far, far_again) = (attempts or [] for attempts in lose_link(hosts, 2, tmp_path, function))
    for first, again in ((near, near_again), (far, far_again)):
        assert first.raised == again.raised == "RankMissing", first
        assert first.after_sec < 2 * TIMEOUT_SEC + 5
        assert again.text == first.text
    assert near.missing == [1]
    assert "rank 1: did not take part" in near.text
    assert far.missing == [0]
    assert "rank 0: serves the store, which does not answer" in far.text


def test_rank_that_is_killed_on_another_host_is_missing_at_once_and_one_that_is_late_is_not(
    hosts: Hosts, tmp_path: Path
) -> None:
    """gloo reports the closed connection at once; the host of the rank that waits sees the late one alive."""
    near, far = (hosts.near, hosts.near_link), (hosts.far, hosts.far_link)
    programs = [
        start_rank(*host, rank, 3, tmp_path, "tests.ranks.two_hosts:lose_rank_1")
        for rank, host in enumerate((near, far, near))
    ]
    with killed_at_end(programs):
        waiting, _, late = (program.finish(LIMIT_SEC) for program in programs)
    first, second = (Attempt(*json.loads(done.stdout)[0]) for done in (waiting, late))
    assert first.raised == "RankMissing"
    assert first.missing == [1]
    assert first.after_sec < KILLED_AFTER_SEC + 2 * 5.0 + 5.0
    assert second.text == first.text
