"""Ranks that are forked from a process that has torch: they are what fresh interpreters are, and end as those do."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from ddpstats.guard import _guard
from ddpstats.testing import RankPool, run_ranks
from ddpstats.testing._rank_main import RankSpec
from ddpstats.testing._rank_process import rank_environ
from ddpstats.testing._rank_server import RankServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def server(rank_server: RankServer) -> RankServer:
    """The session's."""
    return rank_server


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankServer]:
    """One of this test's own, in place of the session's."""
    monkeypatch.setattr(RankServer, "current", None)
    with RankServer(rank_environ(RankSpec(0, 1, 0, 0, 0, 0), {}), ["numpy"]) as server:
        yield server


def parent() -> int:
    return os.getppid()


def guards() -> tuple[int, list[str], int]:
    """This rank's parent, and the modes and collectives of its guards."""
    dist.all_reduce(torch.ones(1))
    guards = _guard._active
    return os.getppid(), [guard.mode for guard in guards], sum(guard.counters.compared for guard in guards)


def surroundings() -> dict[str, Any]:
    return {
        "argv": sys.argv,
        "paths": sys.path,
        "cwd": os.getcwd(),
        "environ": {key: value for key, value in os.environ.items() if key != "MASTER_PORT"},
        "threads": torch.get_num_threads(),
        "session is own": os.getsid(0) == os.getpid() == os.getpgrp(),
        "stdin": os.fstat(0).st_rdev,
        "main": sorted(vars(sys.modules["__main__"]).keys() & {"serve", "become"}),
        "ddpstats": sorted(name for name in sys.modules if name.startswith("ddpstats") and "testing" not in name),
        "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
    }


def drawn() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), numpy.random.rand()


def end(how: str) -> None:
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_forked_rank_is_the_servers_child(server: RankServer) -> None:
    parents = run_ranks(parent, 2).values()
    assert server._process is not None
    assert parents == [server._process.pid] * 2 != [os.getpid()] * 2


def test_what_the_suite_preloads_starts_no_thread(server: RankServer) -> None:
    """A fork would leave the thread behind, with whatever it held."""
    run_ranks(parent, 1)
    assert server._process is not None
    assert len(os.listdir(f"/proc/{server._process.pid}/task")) == 1


@pytest.mark.parametrize("name", ["server", "own_server"])
def test_it_finds_what_a_fresh_one_finds(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    request.getfixturevalue(name)
    monkeypatch.setenv("OF_THIS_TEST", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "imports"))
    forked = run_ranks(surroundings, 2, env={"OF_THE_RANKS": "2"}).values()
    monkeypatch.setattr(RankServer, "current", None)
    fresh = run_ranks(surroundings, 2, env={"OF_THE_RANKS": "2"}).values()
    if name == "server":  # it has imported the package before
        imported = [one.pop("ddpstats") for one in [*forked, *fresh]]
        assert set(imported[-1]) < set(imported[0])
    assert forked == fresh


def test_what_is_read_when_a_process_starts_needs_a_fresh_one(server: RankServer) -> None:
    run_ranks(parent, 1)
    for env in (
        {"PYTHONHASHSEED": "1"},
        {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        {"OMP_NUM_THREADS": "2"},
    ):
        assert run_ranks(parent, 1, env=env).values() == [os.getpid()]


@pytest.mark.parametrize("name", ["server", "own_server"])
def test_a_forked_rank_begins_the_guard_of_its_environment(name: str, request: pytest.FixtureRequest) -> None:
    """Also where the server has imported ddpstats: a guard that had begun there would leave the fork."""
    server: RankServer = request.getfixturevalue(name)
    for mode, modes in (("strict", ["strict"]), ("off", [])):
        found = run_ranks(guards, 2, env={"DDPSTATS_GUARD": mode}).values()
        assert server._process is not None
        assert found == [(server._process.pid, modes, 1 if modes else 0)] * 2


def test_ranks_draw_numbers_of_their_own(server: RankServer) -> None:
    numbers = run_ranks(drawn, 2).values() + run_ranks(drawn, 2).values()
    assert [len(set(column)) for column in zip(*numbers, strict=True)] == [4, 4, 4]


@pytest.mark.parametrize(("how", "exit_code"), [("exit", 7), ("kill", -9)])
def test_how_it_ended_is_told(server: RankServer, how: str, exit_code: int) -> None:
    assert [one.exit_code for one in run_ranks(end, 2, how)] == [exit_code] * 2


def test_what_it_prints_goes_where_the_parent_prints(server: RankServer, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(print, 1, "said by a rank").values()
    assert capfd.readouterr().out == "said by a rank\n"


def test_a_server_that_is_killed_costs_its_ranks_and_no_more(own_server: RankServer) -> None:
    with RankPool(2) as pool:
        first = pool.run(parent).values()
        assert own_server._process is not None
        os.kill(own_server._process.pid, signal.SIGKILL)
        own_server._process.wait()
        pool.restart()
        assert first != [os.getpid()] * 2 == pool.run(parent).values()


def test_nothing_outlives_a_parent_that_is_killed(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            from ddpstats.testing import RankPool
            from ddpstats.testing._rank_main import RankSpec
            from ddpstats.testing._rank_process import rank_environ
            from ddpstats.testing._rank_server import RankServer

            environ = rank_environ(RankSpec(0, 1, 0, 0, 0, 0), {})
            with RankServer(environ) as server, RankPool(2) as pool:
                print(*pool.run(os.getpid).values(), server._process.pid, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
