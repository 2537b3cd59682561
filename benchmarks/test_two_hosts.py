"""Ranks on two hosts: a link that goes down is `RankMissing` within the timeout, and a bad one only makes it slow.

One case of the first is in `tests/ranks/test_two_hosts.py`.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from benchmarks.bad_link import bad_link
from benchmarks.two_hosts_runs import STEPS
from tests.hosts import Hosts
from tests.ranks.two_hosts import LIMIT_SEC, TIMEOUT_SEC, all_ready, killed_at_end, lose_link, start_rank

RUNS = "benchmarks.two_hosts_runs"
REDUCES = "tests.ranks.two_hosts:reduce_before_and_after"
CUT_OFF = "rank 0: serves the store, which does not answer"


@pytest.mark.parametrize("function", [REDUCES, f"{RUNS}:wait_for_rank_0"])
def test_link_that_goes_down_is_rank_missing_on_all_three_ranks(hosts: Hosts, function: str, tmp_path: Path) -> None:
    near, *far = lose_link(hosts, 3, tmp_path, function)
    (first, _), (second, _) = (attempts or [] for attempts in far)
    assert first.text == second.text
    assert first.missing == second.missing == [0]
    assert CUT_OFF in first.text
    assert bool(near) == (function == REDUCES)  # else rank 0 stays away
    if near:
        assert near[0].missing == [1, 2]
        assert "ranks 1, 2: did not take part" in near[0].text
    for attempts in filter(None, (near, *far)):
        now, again = attempts
        assert now.raised == again.raised == "RankMissing", now
        assert now.after_sec < 2 * TIMEOUT_SEC + 5
        assert again.text == now.text
        assert again.after_sec < TIMEOUT_SEC / 2


def test_link_that_goes_down_before_first_use_is_rank_missing_on_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    (near, _), (far, _) = (each or [] for each in lose_link(hosts, 2, tmp_path, f"{RUNS}:reduce_for_the_first_time"))
    for attempt in (near, far):
        assert attempt.raised == "RankMissing", attempt
        assert attempt.after_sec < 2 * TIMEOUT_SEC + 5
    assert near.missing == [1], near.text
    assert far.missing == [0]
    assert "rank 0: serves the store, which does not answer" in far.text


GUARDED = [(mode, name) for mode in ("strict", "step") for name in ("all_reduce", "barrier", "step alone", "exchange")]


@pytest.mark.parametrize(
    "call", [("check_capture",), *(("call_under_guard", *guarded) for guarded in GUARDED)], ids=" ".join
)
def test_link_that_goes_down_before_call_that_watches_is_rank_missing(
    hosts: Hosts, call: tuple[str, ...], tmp_path: Path
) -> None:
    name, *arguments = call
    attempts = [each or [] for each in lose_link(hosts, 2, tmp_path, f"{RUNS}:{name}", *arguments)]
    for first, again in attempts:
        assert first.raised == again.raised == "RankMissing", first
        assert first.after_sec < 2 * TIMEOUT_SEC + 5, first
        assert again.text == first.text
    (near, _), (far, _) = attempts
    assert near.missing == [1], near.text
    assert far.missing == [0]
    assert CUT_OFF in far.text


@pytest.mark.parametrize("away_sec", [0.0, 5.0], ids=["1 % of the packets are lost", "and for 5 s all of them"])
def test_bad_link_makes_steps_slow_and_their_results_right(away_sec: float, tmp_path: Path) -> None:
    """A packet takes 10 ms each way."""
    with bad_link(delay_sec=0.01, loss=0.01) as link:
        function = f"{RUNS}:train_over_bad_link"
        programs = [
            start_rank(namespace, link.link, rank, 2, tmp_path, function)
            for rank, namespace in enumerate((link.near, link.far))
        ]
        with all_ready(programs, tmp_path):
            if away_sec:
                link.set("down")
                time.sleep(away_sec)
                link.set("up")
            ended = [program.finish(LIMIT_SEC) for program in programs]
    for done in ended:
        assert done.stdout, done.stderr
        longest_sec, compared = json.loads(done.stdout)
        assert longest_sec > 0.8 * away_sec
        assert compared == STEPS


def test_processes_with_one_number_in_two_containers_are_told_apart(hosts: Hosts, tmp_path: Path) -> None:
    """Taken for the other's, the process's own number would say that the other rank is gone: it began later."""
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here, which gives a program process numbers of its own")
    function = f"{RUNS}:wait_for_late_rank"
    ranks = [start_rank(hosts.near, hosts.near_link, 0, 2, tmp_path, function, container=container)]
    time.sleep(0.1)  # so that they begin at different times, which the kernel gives in steps of 10 ms
    ranks.append(start_rank(hosts.far, hosts.far_link, 1, 2, tmp_path, function, container=container))
    with killed_at_end(ranks):
        ended = [rank.finish(LIMIT_SEC) for rank in ranks]
    assert [done.stdout.strip() for done in ended] == ['[1, {"a": 0.5}]'] * 2, ended
