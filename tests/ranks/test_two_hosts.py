"""A rank that is cut off from the host of the store raises `RankMissing` within its timeout, and so do the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import Hosts
from tests.ranks.two_hosts import TIMEOUT_SEC, lose_link

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
    assert "this host is cut off: the store does not answer; rank 0 of other hosts" in far.text
