"""Two hosts and the link between them: whoever is cut off from the store says so within its deadline, too."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import NEAR, bad_link, ip
from tests.programs import Program
from tests.transport.two_hosts_rank import STEPS, TIMEOUT_SEC

LIMIT_SEC = 100.0
SLACK_SEC = 5.0


def rank_on(
    space: str, link: str, rank: int, ranks: int, phase: str, directory: Path, container: Sequence[str] = ()
) -> Program:
    """A rank on the host that is this namespace; rank 0 is on the first one, and serves the store."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": link, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    arguments = ["-m", "tests.transport.two_hosts_rank", str(rank), str(ranks), NEAR, "29511", phase, str(directory)]
    return Program(arguments, environ, prefix=["ip", "netns", "exec", space, *container])


@contextlib.contextmanager
def ending(processes: Sequence[Program]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()


@contextlib.contextmanager
def ready(processes: Sequence[Program], directory: Path) -> Iterator[None]:
    """Inside, all ranks have come to where they say so; they end with it."""
    with ending(processes):
        deadline = time.monotonic() + LIMIT_SEC
        while len(list(directory.glob("ready*"))) < len(processes):
            assert time.monotonic() < deadline, "the ranks do not come up"
            assert all(process.poll() is None for process in processes), [process.errors() for process in processes]
            time.sleep(0.1)
        yield


def told_by_both(hosts: tuple[str, str, str, str], phase: str, ranks: int, directory: Path) -> list[Any]:
    """What the ranks say: rank 0 with the store on the first host, the others on the second."""
    near, far, here, there = hosts
    processes = [rank_on(near, here, 0, ranks, phase, directory)]
    processes += [rank_on(far, there, rank, ranks, phase, directory) for rank in range(1, ranks)]
    with ready(processes, directory):
        if phase == "during":
            time.sleep(1.0)  # the second host waits in its reduction
        ip("-n", near, "link", "set", here, "down")
        (directory / "down").touch()
        asked = processes[1:] if phase == "during" else processes
        return [json.loads(process.finish(LIMIT_SEC).stdout or "null") for process in asked]


@pytest.mark.parametrize("phase", ["between", "during"])
def test_the_link_goes_down(hosts: tuple[str, str, str, str], phase: str, tmp_path: Path) -> None:
    said = told_by_both(hosts, phase, 3, tmp_path)
    for told, again in said:
        assert told["raised"] == again["raised"] == "RankMissing", told
        assert told["after_sec"] < TIMEOUT_SEC + SLACK_SEC
        assert again["text"] == told["text"]
        assert again["after_sec"] < 1.0
    *near, (first, _), (second, _) = said
    assert first["text"] == second["text"]
    assert first["missing"] == second["missing"] == [0]
    assert "this host is cut off: the store does not answer; rank 0 of other hosts" in first["text"]
    for told, _ in near:
        assert told["missing"] == [1, 2]
        assert "ranks 1, 2: did not take part" in told["text"]


def test_the_link_goes_down_before_the_first_use(hosts: tuple[str, str, str, str], tmp_path: Path) -> None:
    said = told_by_both(hosts, "before", 2, tmp_path)
    for told, _ in said:
        assert told["raised"] == "RankMissing", told
        assert told["after_sec"] < TIMEOUT_SEC + SLACK_SEC
    (near, _), (far, _) = said
    assert near["missing"] == [1], near["text"]
    assert far["missing"] == [0]
    assert "rank 0: serves the store, which does not answer" in far["text"]


@pytest.mark.parametrize(
    "call",
    [
        "NaNCapture.check",
        *(
            f"{mode} {name}"
            for mode in ("strict", "step")
            for name in ("all_reduce", "barrier", "step alone", "exchange")
        ),
    ],
)
def test_the_link_goes_down_before_a_call_that_watches(
    hosts: tuple[str, str, str, str], call: str, tmp_path: Path
) -> None:
    said = told_by_both(hosts, call, 2, tmp_path)
    for told, again in said:
        assert told["raised"] == again["raised"] == "RankMissing", told
        assert told["after_sec"] < TIMEOUT_SEC + SLACK_SEC, told
        assert again["text"] == told["text"]
    (near, _), (far, _) = said
    assert near["missing"] == [1], near["text"]
    assert far["missing"] == [0]
    assert "this host is cut off: the store does not answer; rank 0 of other hosts" in far["text"]


@pytest.mark.parametrize("away_sec", [0.0, 5.0], ids=["1 % of the packets are lost", "and for 5 s all of them"])
def test_a_bad_link_makes_it_slow_and_nothing_else(away_sec: float, tmp_path: Path) -> None:
    """Each way takes 10 ms."""
    with bad_link(delay_sec=0.01, loss=0.01) as link:
        spaces = (link.near, link.far)
        processes = [rank_on(space, link.link, rank, 2, "bad link", tmp_path) for rank, space in enumerate(spaces)]
        with ready(processes, tmp_path):
            if away_sec:
                link.set("down")
                time.sleep(away_sec)
                link.set("up")
            ended = [process.finish(LIMIT_SEC) for process in processes]
    for done in ended:
        assert done.stdout, done.stderr
        longest_sec, compared = json.loads(done.stdout)
        assert longest_sec > 0.8 * away_sec
        assert compared == STEPS


def test_processes_with_one_number_in_two_containers_are_not_one(
    hosts: tuple[str, str, str, str], tmp_path: Path
) -> None:
    """Taken for the other's, one's own number would say that the other rank is gone: it began at another time."""
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here, which gives a program process numbers of its own")
    near, far, here, there = hosts
    ranks = [rank_on(near, here, 0, 2, "own pids", tmp_path, container)]
    time.sleep(0.1)  # so that they begin at different times, which are told in steps of 10 ms
    ranks.append(rank_on(far, there, 1, 2, "own pids", tmp_path, container))
    with ending(ranks):
        ended = [rank.finish(LIMIT_SEC) for rank in ranks]
    assert [done.stdout.strip() for done in ended] == ['[1, {"a": 0.5}]'] * 2, ended
