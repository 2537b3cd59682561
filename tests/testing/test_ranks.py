"""`run_ranks` and `RankPool` return what ranks answer, kill late ranks, and leave no process or file behind."""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver as standard_forkserver, resource_tracker
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from ddpstats.testing import forkserver, ranks
from ddpstats.testing.faults import die
from ddpstats.testing.outcomes import (
    RankDied,
    RankOutcomes,
    RanksFailed,
    RankTimedOut,
    RankUnpicklable,
)
from ddpstats.testing.ranks import PerRank, RankPool, run_ranks
from tests import programs

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="scans /proc")


# What runs on the ranks.


def who() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def pid() -> int:
    return os.getpid()


def add(a: Any, b: Any = 0) -> Any:
    return a + b


def all_reduced(value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


def surroundings() -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "DDPSTATS_TEST_VARIABLE")
    return {name: os.environ.get(name) for name in names} | {
        "threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "sid": os.getsid(0),
        "pid": os.getpid(),
        "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
    }


def temporary_directory() -> str:
    return tempfile.gettempdir()


def leave_another_environment() -> None:
    os.environ["DDPSTATS_TEST_VARIABLE"] = "left"
    os.environ["RANK"] = "7"
    del os.environ["WORLD_SIZE"]


def raise_on_rank_1() -> int:
    if dist.get_rank() == 1:
        raise KeyError("a key that rank 1 lacks")
    return 7


def exit_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise SystemExit(4)


def end_on_rank_1(how: Callable[[], Any]) -> int:
    if dist.get_rank() == 1:
        print("last words of rank 1", file=sys.stderr, flush=True)
        how()
    return 7


def leave_with_3() -> NoReturn:
    os._exit(3)


def hang_on_rank_1(seconds: float) -> None:
    if dist.get_rank() == 1:
        time.sleep(seconds)  # the line that the stack must name
    dist.all_reduce(torch.ones(1))


def finish_big_on_rank_1(seconds: float) -> bytes:
    if dist.get_rank() == 0:
        time.sleep(seconds)
    return bytes(8_000_000)


def hang_with_child(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    pathlib.Path(path).write_text(str(child.pid))
    time.sleep(1000)


def die_with_forked_child(path: str) -> None:
    """Die while a child holds the rank's socket: the socket alone does not show that the rank is gone."""
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    pathlib.Path(path).write_text(str(child))
    die()


def unpicklable_value() -> Any:
    return lambda: "a lambda that pickle refuses"


class Unopenable:
    def __reduce__(self) -> Any:
        return _refuse, ("to be opened",)


def _refuse(why: str) -> None:
    raise ValueError(f"refused {why}")


def unopenable_value() -> Any:
    return Unopenable()


class NeedsTwo(Exception):
    def __init__(self, rank: int, *, key: str) -> None:
        super().__init__(f"rank {rank} lacks {key}")


class Local(Exception):
    def __reduce__(self) -> NoReturn:
        raise TypeError("no pickle for me")


def raise_needs_two() -> None:
    raise NeedsTwo(1, key="loss")


def raise_local() -> None:
    raise Local("local news")


def only_rank_0_reduces() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def leave_group() -> None:
    dist.destroy_process_group()


# The parent's side.


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """One for all: each test that breaks it is also a test that it recovers."""
    with RankPool(2, timeout_sec=30) as pool:
        yield pool


@pytest.fixture
def started() -> Callable[[], set[int]]:
    """Calls give the child processes that were not there before the test (the shared pool's were)."""
    run_ranks(pid, 1)  # so that the server runs, which stays with its directory
    before = children()
    return lambda: children() - before


def failed(outcomes: RankOutcomes, rank: int) -> BaseException:
    return outcomes.errors()[rank]


def children() -> set[int]:
    """Return the processes of all sessions that ranks of this process lead, dead but not reaped ones included."""
    server = standard_forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # `forkserver` starts one
    parents = {os.getpid(), tracker, server}
    pids = set()
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(_fields(stat)[1]) in parents:
                pids.add(int(stat.parent.name))
    return pids - parents


def in_session(sid: int) -> set[int]:
    pids = set()
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = _fields(stat)[:4]
            if int(session) == sid and state != "Z":
                pids.add(int(stat.parent.name))
    return pids


def _fields(stat: pathlib.Path) -> list[str]:
    return stat.read_text().rpartition(")")[2].split()


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _fields(pathlib.Path(f"/proc/{pid}/stat"))[0] != "Z"
    return False


def wait_until(condition: Callable[[], bool], limit_sec: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_sec
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# Results.


def test_values_come_in_rank_order() -> None:
    outcomes = run_ranks(who, 3)
    assert outcomes.values() == [(0, 3), (1, 3), (2, 3)]
    assert [(each.rank, each.ok, each.error, each.traceback, each.exit_code) for each in outcomes] == [
        (rank, True, None, "", 0) for rank in range(3)
    ]
    assert outcomes.errors() == {}


def test_ranks_get_environment_session_and_one_thread() -> None:
    env = {"DDPSTATS_TEST_VARIABLE": "seen"}
    for rank, seen in enumerate(run_ranks(surroundings, 2, env=env).values()):
        assert seen.pop("pid") == seen.pop("sid") != os.getsid(0)
        assert seen == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "DDPSTATS_TEST_VARIABLE": "seen",
            "threads": 1,
            "backend": "gloo",
            "cuda": False,
        }


def test_ranks_use_the_temporary_directory_of_their_environment(tmp_path: pathlib.Path) -> None:
    assert run_ranks(temporary_directory, 1, env={"TMPDIR": str(tmp_path)}).values() == [str(tmp_path)]


def test_environment_changed_by_a_function_is_restored_for_the_next_run(pool: RankPool) -> None:
    before = pool.run(surroundings).values()
    pool.run(leave_another_environment).values()
    assert pool.run(surroundings).values() == before


def test_arguments_by_position_by_name_and_by_rank(pool: RankPool) -> None:
    assert pool.run(add, 1, b=2).values() == [3, 3]
    assert pool.run(add, PerRank(["a", "b"]), b="x").values() == ["ax", "bx"]
    assert pool.run(add, 1, b=PerRank((10, 20))).values() == [11, 21]
    assert pool.run(all_reduced, PerRank([1.0, 2.0])).values() == [3.0, 3.0]


def test_large_arguments_and_values_travel_whole(pool: RankPool) -> None:
    blob = os.urandom(3_000_000)
    assert pool.run(add, blob, b=PerRank([b"0", b"1"])).values() == [blob + b"0", blob + b"1"]


# What the caller gets wrong is an error before anything starts.


def test_per_rank_of_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="PerRank holds 3 values, but there are 2 ranks"):
        run_ranks(add, 2, PerRank([1, 2, 3]))


def test_numbers_that_are_not_positive_are_refused() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        run_ranks(who, 0)
    with pytest.raises(ValueError, match="timeout_sec must be positive, not 0"):
        run_ranks(who, 2, timeout_sec=0)


@LINUX
def test_a_function_that_does_not_pickle_starts_nothing(started: Callable[[], set[int]]) -> None:
    with pytest.raises((AttributeError, TypeError)), RankPool(2) as pool:
        pool.run(lambda: 0)
    assert started() == set()


@pytest.mark.slow
def test_function_of_main_is_refused(tmp_path: pathlib.Path) -> None:
    done = programs.run([script_at(tmp_path, "def mine(): pass\nrun_ranks(mine, 2)")])
    assert "ValueError: mine is defined in __main__, which the ranks do not run" in done.stderr


# Failures.


def test_an_exception_comes_back_with_its_traceback() -> None:
    outcomes = run_ranks(raise_on_rank_1, 2)
    assert outcomes[0].value == 7
    assert outcomes[0].ok
    assert isinstance(failed(outcomes, 1), KeyError)
    assert failed(outcomes, 1).args == ("a key that rank 1 lacks",)
    assert "in raise_on_rank_1" in outcomes[1].traceback
    with pytest.raises(RanksFailed) as caught:
        outcomes.values()
    assert str(caught.value).startswith("1 of 2 ranks failed\n--- rank 1 ---\nTraceback (most recent call last)")
    assert "KeyError: 'a key that rank 1 lacks'" in str(caught.value)
    assert caught.value.__cause__ is failed(outcomes, 1)


def test_system_exit_is_an_answer(pool: RankPool) -> None:
    error = failed(pool.run(exit_on_rank_1), 1)
    assert isinstance(error, SystemExit)
    assert error.code == 4


@pytest.mark.parametrize(
    ("how", "exit_code", "words"),
    [
        pytest.param(die, -signal.SIGKILL, "killed by SIGKILL (exit code -9)", id="sigkill"),
        pytest.param(os.abort, -signal.SIGABRT, "killed by SIGABRT (exit code -6)", id="sigabrt"),
        pytest.param(leave_with_3, 3, "exit code 3", id="exit", marks=pytest.mark.slow),
    ],
)
def test_rank_that_dies_is_reported_with_its_last_words(how: Callable[[], Any], exit_code: int, words: str) -> None:
    outcomes = run_ranks(end_on_rank_1, 2, how)
    assert outcomes[0].value == 7
    error = failed(outcomes, 1)
    assert isinstance(error, RankDied)
    assert (error.exit_code, outcomes[1].exit_code) == (exit_code, exit_code)
    assert f"rank 1 died without an answer: {words}" in str(error)
    assert "last words of rank 1" in str(error)
    assert ("in end_on_rank_1" in str(error)) == (how is os.abort), "faulthandler prints the stack"
    with pytest.raises(RanksFailed, match=r"--- rank 1 ---\nRankDied: rank 1 died"):
        outcomes.values()


def test_rank_killed_while_starting_is_reported_by_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    start = forkserver.Fork.start

    def start_and_kill(fork: forkserver.Fork) -> None:
        start(fork)
        if fork._environ["RANK"] == "1":
            fork.kill()

    monkeypatch.setattr(forkserver.Fork, "start", start_and_kill)
    outcomes = run_ranks(who, 2, timeout_sec=2)
    assert isinstance(failed(outcomes, 0), RankTimedOut)
    assert "in _join_group" in str(failed(outcomes, 0))
    assert isinstance(failed(outcomes, 1), RankDied)


def test_ranks_that_cannot_start_say_why() -> None:
    outcomes = run_ranks(who, 2, env={"DDPSTATS_GUARD": "sometimes"})
    for error in outcomes.errors().values():
        assert isinstance(error, RankDied)
        assert "ConfigError: DDPSTATS_GUARD='sometimes'" in str(error)
    assert len(outcomes.errors()) == 2


@pytest.mark.parametrize("fn", [raise_needs_two, raise_local])
def test_exception_that_cannot_be_pickled_keeps_its_traceback(fn: Callable[[], None], pool: RankPool) -> None:
    outcomes = pool.run(fn)
    for rank, error in outcomes.errors().items():
        assert isinstance(error, RankUnpicklable)
        assert f"rank {rank}: the exception " in str(error)
        assert f"in {fn.__name__}" in outcomes[rank].traceback
        assert f"in {fn.__name__}" in str(error)
    assert len(outcomes.errors()) == 2


def test_value_that_cannot_be_pickled_or_unpickled_is_named(pool: RankPool) -> None:
    error = failed(pool.run(unpicklable_value), 1)
    assert isinstance(error, RankUnpicklable)
    assert "rank 1: the return value function could not be pickled" in str(error)
    assert "unpicklable_value.<locals>.<lambda>" in str(error)
    error = failed(pool.run(unopenable_value), 0)
    assert isinstance(error, RankUnpicklable)
    assert "rank 0: the return value Unopenable" in str(error)
    assert "refused to be opened" in str(error)


# The time limit.


def test_a_large_argument_waits_for_a_rank_that_starts_late(monkeypatch: pytest.MonkeyPatch) -> None:
    start = forkserver.Fork.start

    def start_late(fork: forkserver.Fork) -> None:
        start(fork)
        assert fork.pid is not None
        os.kill(fork.pid, signal.SIGSTOP)
        threading.Timer(3.0, os.kill, (fork.pid, signal.SIGCONT)).start()

    monkeypatch.setattr(forkserver.Fork, "start", start_late)
    monkeypatch.setattr(ranks, "_STALL_SEC", 1)
    assert run_ranks(add, 1, b"x" * 4_000_000, b"y").values() == [b"x" * 4_000_000 + b"y"]


def test_ranks_past_the_limit_are_killed_and_say_where_they_were() -> None:
    started = time.monotonic()
    outcomes = run_ranks(hang_on_rank_1, 2, 1000, timeout_sec=2)
    assert time.monotonic() - started < 2 + 20
    lines, first = inspect.getsourcelines(hang_on_rank_1)
    sleeping = first + next(i for i, line in enumerate(lines) if "time.sleep" in line)
    error = failed(outcomes, 1)
    assert isinstance(error, RankTimedOut)
    assert "rank 1 still ran after 2 s and was killed" in str(error)
    assert f'test_ranks.py", line {sleeping} in hang_on_rank_1' in str(error)
    assert f'test_ranks.py", line {first + len(lines) - 1} in hang_on_rank_1' in str(failed(outcomes, 0))
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2


@pytest.mark.slow
def test_a_rank_that_answered_in_time_keeps_its_answer() -> None:
    """Also one whose answer is too large for the socket, and comes behind a rank that hangs."""
    outcomes = run_ranks(finish_big_on_rank_1, 2, 1000, timeout_sec=2)
    assert isinstance(failed(outcomes, 0), RankTimedOut)
    assert outcomes[1].ok
    assert len(outcomes[1].value) == 8_000_000


@pytest.mark.slow
@LINUX
def test_the_limit_kills_a_ranks_children_too(tmp_path: pathlib.Path) -> None:
    paths = [tmp_path / "0", tmp_path / "1"]
    assert len(run_ranks(hang_with_child, 2, PerRank([str(path) for path in paths]), timeout_sec=2).errors()) == 2
    for path in paths:
        assert wait_until(lambda path=path: not is_running(int(path.read_text())))  # type: ignore[misc]


@pytest.mark.slow
@LINUX
def test_a_death_is_seen_though_a_child_holds_the_socket(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "child"
    started = time.monotonic()
    assert isinstance(failed(run_ranks(die_with_forked_child, 1, str(path), timeout_sec=60), 0), RankDied)
    assert time.monotonic() - started < 30
    assert wait_until(lambda: not is_running(int(path.read_text())))


# Nothing stays behind.


@LINUX
def test_nothing_is_left(
    started: Callable[[], set[int]], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before_fds, before_threads = open_fds(), threading.active_count()
    with RankPool(2) as pool:
        seen = [rank["sid"] for rank in pool.run(surroundings).values()]
        assert started() == set(seen), "the ranks and no helper"
        assert all(in_session(sid) for sid in seen)
    assert started() == set()
    assert [in_session(sid) for sid in seen] == [set(), set()]
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before_threads
    assert wait_until(lambda: open_fds() <= before_fds), "the store's server closes its sockets on its own thread"


@LINUX
def test_nothing_is_left_after_a_kill(
    started: Callable[[], set[int]], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_ranks(time.sleep, 1, 1000, timeout_sec=1)
    assert started() == set()
    assert list(tmp_path.iterdir()) == []


@LINUX
def test_an_interrupt_in_the_parent_ends_the_ranks(started: Callable[[], set[int]]) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with RankPool(1) as pool:
        pids = pool.run(pid).values()
        timer = threading.Timer(1.0, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(time.sleep, 1000)
        timer.join()
        assert not any(map(is_running, pids))
        assert started() == set()
        assert pool.run(add, 1).values() == [1]


@LINUX
def test_a_pool_that_is_dropped_ends_its_ranks(started: Callable[[], set[int]]) -> None:
    pool = RankPool(1)
    assert started() == set(), "nothing starts before the first run"
    pids = set(pool.run(pid).values())
    assert started() == pids
    del pool
    assert started() == set()


IMPORTS = """
import os, sys, threading, time
from ddpstats.testing.ranks import PerRank, RankPool, run_ranks
from tests.testing.test_ranks import hang_on_rank_1, hang_with_child, pid, raise_on_rank_1, who

pool = RankPool(2)

def start():
    print(*pool.run(pid).values(), flush=True)
"""


def script_at(tmp_path: pathlib.Path, text: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(IMPORTS + textwrap.dedent(text))
    return str(script)


def printed_pids(parent: programs.Program, count: int) -> list[list[int]]:
    """Return the process numbers in the first ``count`` lines that the parent prints."""
    assert wait_until(lambda: parent.output().count("\n") >= count), parent.errors()
    return [list(map(int, line.split())) for line in parent.output().splitlines()[:count]]


@LINUX
def test_a_parent_killed_by_sigkill_leaves_no_rank(tmp_path: pathlib.Path) -> None:
    """Nor a child of a rank. And the end of the thread that started the ranks is not the end of the parent."""
    paths = [tmp_path / "0", tmp_path / "1"]
    script = script_at(
        tmp_path,
        """
        thread = threading.Thread(target=start); thread.start(); thread.join()
        pool.run(hang_with_child, PerRank(sys.argv[1:]))
        """,
    )
    with programs.Program([script, *map(str, paths)], os.environ) as parent:
        (pids,) = printed_pids(parent, 1)
        assert wait_until(lambda: all(path.exists() and path.read_text() for path in paths)), "the ranks are at work"
        assert list(map(is_running, pids)) == [True, True]
    pids += [int(path.read_text()) for path in paths]
    assert len(pids) == 4
    assert wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.slow
@LINUX
def test_the_end_of_a_forked_copy_of_the_parent_is_not_the_end_of_its_ranks(tmp_path: pathlib.Path) -> None:
    script = script_at(
        tmp_path,
        """
        start()
        if os.fork() == 0:
            sys.exit()
        os.wait()
        start()
        """,
    )
    with programs.Program([script], os.environ) as parent:
        pids, pids_later = printed_pids(parent, 2)
        assert pids_later == pids


@pytest.mark.slow
def test_resource_warnings_are_not_emitted(tmp_path: pathlib.Path) -> None:
    script = script_at(
        tmp_path,
        """
        import gc
        run_ranks(who, 2)
        run_ranks(hang_on_rank_1, 2, 1000, timeout_sec=0.5)
        with RankPool(2) as other:
            other.run(raise_on_rank_1)
        run_ranks(time.sleep, 1, 1000, timeout_sec=0.5)
        left = RankPool(1)
        left.run(who)  # and is left to the interpreter's end
        gc.collect()
        print("done")
        """,
    )
    done = programs.run(["-X", "dev", "-W", "error::ResourceWarning", script], fresh=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "done")
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_hypothesis_is_not_imported() -> None:
    program = "import sys, ddpstats.testing.ranks, ddpstats.testing.faults; print('hypothesis' in sys.modules)"
    assert programs.run(["-c", program], fresh=True).stdout == "False\n"


# The pool.


def test_a_pool_keeps_its_processes(pool: RankPool) -> None:
    pids = pool.run(pid).values()
    assert [pool.run(pid).values() for _ in range(3)] == [pids] * 3
    pool.restart()
    assert not set(pool.run(pid).values()) & set(pids)


def unix_sockets() -> list[str]:
    """Return the names of this process's sockets on this host: "" for one of a pair, which no name leads to."""
    names = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
            if duplicate.family == socket.AF_UNIX:
                names.append(str(duplicate.getsockname()))
    return names


def test_parent_and_ranks_talk_over_sockets_without_a_name() -> None:
    assert run_ranks(unix_sockets, 2).values() == [[""]] * 2


@pytest.mark.parametrize("fn", [only_rank_0_reduces, leave_group, raise_on_rank_1])
def test_a_group_out_of_step_is_not_used_again(fn: Callable[[], None], pool: RankPool) -> None:
    """Nor one of ranks that failed."""
    pids = pool.run(pid).values()
    assert [outcome.ok for outcome in pool.run(fn)] == [True, fn.__name__ != "raise_on_rank_1"]
    assert pool.run(all_reduced, 1.0).values() == [2.0, 2.0]
    assert not set(pool.run(pid).values()) & set(pids)


def test_a_pool_recovers_from_a_death(pool: RankPool) -> None:
    pids = pool.run(pid).values()
    outcomes = pool.run(end_on_rank_1, die)
    assert isinstance(failed(outcomes, 1), RankDied)
    assert not set(pool.run(pid).values()) & set(pids)
    assert pool.run(all_reduced, 1.0).values() == [2.0, 2.0]


def test_a_rank_that_dies_between_two_runs_is_reported(pool: RankPool) -> None:
    victim = pool.run(pid).values()[1]
    os.kill(victim, signal.SIGKILL)
    assert isinstance(failed(pool.run(pid), 1), RankDied)
    assert len(pool.run(pid).values()) == 2


def test_a_closed_pool_refuses() -> None:
    pool = RankPool(2)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="this RankPool is closed"):
        pool.run(pid)
