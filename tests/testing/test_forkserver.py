"""What ranks are forked from (`ddpstats.testing.forkserver`): its deadlines, and what it leaves as it was."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver
from typing import Any, NoReturn

import pytest

from ddpstats.testing import forkserver as own, ranks

Servers = dict[Any, forkserver.ForkServer]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="scans /proc")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """Yield the servers, of which there are none yet. Each starts without torch, and two that are idle stay."""
    found: Servers = {}
    monkeypatch.setattr(own, "_servers", found)
    monkeypatch.setattr(own, "_preloaded", ["colorsys"])
    monkeypatch.setattr(own, "_MOST_IDLE", 2)
    yield found
    for server in found.values():
        own._end(server)


def forked(function: Callable[..., Any] = os.getpid, *args: Any, stderr: int = 2, **env: str) -> own.Forked:
    return own.fork(function, *args, environ={**os.environ, **env}, stdout=1, stderr=stderr)


def pid_of(server: forkserver.ForkServer) -> int:
    pid: int = server._forkserver_pid  # type: ignore[attr-defined]
    return pid


def is_there(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_server_that_starts_leaves_the_start_method_to_the_program(
    servers: Servers,
) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    try:
        assert forked().wait(30) == 0
        assert multiprocessing.get_start_method(allow_none=True) is None
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_module_of_the_directory_alone_is_not_imported_by_the_server(
    servers: Servers, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "colorsys.py").write_text("open('imported', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert forked().wait(30) == 0
    assert not (tmp_path / "imported").exists()


@LINUX
def test_servers_of_many_environments_end_except_the_last_ones(servers: Servers) -> None:
    pids = []
    for number in range(3):
        assert forked(PYTHON_OF_THIS_TEST=str(number)).wait(30) == 0
        pids.append(pid_of(list(servers.values())[-1]))
    assert [is_there(pid) for pid in pids] == [False, True, True]


@LINUX
def test_server_with_a_running_fork_stays_whatever_starts_later(servers: Servers) -> None:
    sleeper = forked(time.sleep, 1000, PYTHON_OF_THIS_TEST="sleeps")
    for number in range(2):
        assert forked(PYTHON_OF_THIS_TEST=str(number)).wait(30) == 0
    assert sleeper.poll() is None
    sleeper.kill()
    assert sleeper.wait(30) == -9


def test_server_that_cannot_import_is_named_and_the_next_fork_starts_another(
    servers: Servers, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks.py").write_text("raise OSError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own, "_preloaded", ["breaks"])
    with pytest.raises(RuntimeError, match="the process that forks ranks has ended, or did not answer within 120 s"):
        forked()
    (tmp_path / "breaks.py").write_text("")
    assert forked().wait(30) == 0


def test_process_killed_before_it_reads_what_to_run_ends_and_fork_returns(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leads no process group yet, and nobody reads from the pipe any more."""

    def made_and_killed(server: forkserver.ForkServer, status_fd: int, life_fd: int) -> own.Forked:
        process = made(server, status_fd, life_fd)
        process.kill()
        assert process.wait(30) == -9
        return process

    made = own.Forked
    monkeypatch.setattr(own, "Forked", made_and_killed)
    assert forked().returncode == -9


def test_function_that_cannot_be_imported_is_told_on_stderr_of_the_process(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("of_this_process_alone")
    exec("def function(): pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with tempfile.TemporaryFile() as stderr:
        assert forked(module.function, stderr=stderr.fileno()).wait(30) == 1
        stderr.seek(0)
        assert b"No module named 'of_this_process_alone'" in stderr.read()


@LINUX
def test_interrupt_while_the_server_starts_leaks_no_descriptor(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forked().wait(30) == 0
    before = open_fds()
    monkeypatch.setattr(connection, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        forked()
    assert open_fds() == before


def test_server_that_does_not_answer_a_connection_ends_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from Python 3.14 on: asking waits for the server, which hangs in an import."""

    class Hangs(forkserver.ForkServer):
        def connect_to_new_process(self, fds: Sequence[int]) -> tuple[int, int]:
            process.wait(30)
            raise EOFError

    monkeypatch.setattr(own, "START_TIMEOUT_SEC", 0.1)
    server: Any = Hangs()
    server._forkserver_alive_fd, server._forkserver_address = os.open(os.devnull, os.O_RDONLY), "/none"
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"]) as process:
        server._forkserver_pid = process.pid
        with pytest.raises(RuntimeError, match="the process that forks ranks has ended, or did not answer"):
            own._connect(server, [])
    assert process.returncode == -9


@pytest.mark.slow
@LINUX
def test_rank_whose_end_nobody_tells_is_given_up_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that the kernel holds in a driver: SIGKILL does not end it."""
    monkeypatch.setattr(ranks, "_REAP_SEC", 0.1)
    monkeypatch.setattr(ranks, "_STOP_GRACE_SEC", 0.1)
    pool = ranks.RankPool(1)
    pool.run(os.getpid).values()
    server = list(own._servers.values())[-1]
    os.kill(pid_of(server), signal.SIGSTOP)
    try:
        began = time.monotonic()
        pool.close()
        assert time.monotonic() - began < 10
    finally:
        os.kill(pid_of(server), signal.SIGCONT)


def test_module_that_starts_ranks_when_imported_says_so_on_its_ranks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from ddpstats.testing import run_ranks\ndef f(): pass\noutcomes = run_ranks(f, 1)\n"
    (tmp_path / "starts_ranks.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("starts_ranks")
    monkeypatch.delitem(sys.modules, "starts_ranks")
    (outcome,) = module.outcomes
    assert "RuntimeError: ranks are started when a module is imported" in outcome.traceback
