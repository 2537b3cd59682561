"""Processes forked from one that has already imported torch, by the fork server of ``multiprocessing``.

An interpreter that imports torch costs seconds of a core; a fork of one that has imported it costs milliseconds.

1. The first `Fork` starts the server: it imports torch and the modules that `preload` names, and then only forks.
2. A fork becomes the leader of a new session, takes the given streams, environment and directory, and calls one
   function.
3. The end of the parent, by SIGKILL too, ends the forks with their process groups, and the server.

There is one server for each process. Variables that Python or torch read while they start, such as PYTHONHASHSEED, are
those of the server; OMP_NUM_THREADS is set again in each fork.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver as standard_forkserver, reduction
from multiprocessing.context import ForkServerProcess
from typing import Any

_LONG_PATH = 60
_ANSWER_SEC = 300.0  # for a server that imports torch from a slow file system

_preloaded = ["torch", "torch.distributed", "ddpstats.testing.rank"]
_lock = threading.Lock()


def preload(modules: Sequence[str]) -> None:
    """Have a server that starts from now on import these modules, too. What cannot be imported is left out."""
    _preloaded.extend(name for name in modules if name not in _preloaded)


class Fork(ForkServerProcess):
    """A forked process, with the ``sys.path`` of this one. It ends with this process.

    Args:
        function: a function at the top level of an importable module.
        args: its arguments, which pickle; a `multiprocessing.connection.Connection` may be one of them.
        environ: all environment variables of the process.
        stdout, stderr: file descriptors for its standard streams; stdin is empty.
        cwd: its current directory.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *args: Any,
        environ: Mapping[str, str],
        stderr: int,
        stdout: int = 1,
        cwd: str | os.PathLike[str] = ".",
    ) -> None:
        super().__init__(target=function, args=args)
        self._environ, self._cwd = dict(environ), os.path.abspath(cwd)
        self._streams: tuple[Any, ...] = (stdout, stderr)

    def start(self) -> None:
        """Start it. Raises `RuntimeError` if there is no server to fork it from, or it does not answer in time.

        A server that does not answer is killed: it is that of all of this process's ``multiprocessing``.
        """
        with _lock, _state_for_the_server():
            standard_forkserver.ensure_running()
            server = (standard_forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
            limit = threading.Timer(_ANSWER_SEC, os.kill, server)
            limit.start()
            try:
                super().start()
            except (ConnectionError, EOFError) as error:
                text = f"the process that forks ranks has ended, or gave no answer for {_ANSWER_SEC:g} s"
                raise RuntimeError(f"{text}: its own stderr may say why") from error
            finally:
                limit.cancel()

    def kill(self) -> None:
        """Kill it with its process group, which outlives it where it left child processes."""
        assert self.pid is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        super().kill()  # where it does not lead a group yet

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_streams": [reduction.DupFd(fd) for fd in self._streams]}

    def run(self) -> None:
        """Call the function, in the new process, and end as an interpreter ends."""
        parent = multiprocessing.parent_process()
        assert parent is not None
        begin([stream.detach() for stream in self._streams], self._environ, self._cwd, parent.sentinel)
        try:
            super().run()
        finally:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are not daemons
            atexit._run_exitfuncs()


@contextlib.contextmanager
def _state_for_the_server() -> Iterator[None]:
    """Hide what the server and its forks would take from this process, and keep what starting it would change.

    ``__main__``: they would run it again. DDPSTATS_GUARD: a guard begins in the ranks, not in the server. A long
    temporary directory: the server's socket is there, and its path has about 100 bytes at most. Starting a process
    also chooses the start method of the whole program, which is for the program to do.
    """
    main, guard, directory = sys.modules["__main__"], os.environ.pop("DDPSTATS_GUARD", None), tempfile.tempdir
    start_method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_preloaded)
    sys.modules["__main__"] = types.ModuleType("__main__")
    if len(tempfile.gettempdir()) > _LONG_PATH and os.path.isdir("/tmp"):
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        sys.modules["__main__"], tempfile.tempdir = main, directory
        if guard is not None:
            os.environ["DDPSTATS_GUARD"] = guard
        if not start_method:
            multiprocessing.set_start_method(None, force=True)


def begin(streams: Sequence[int], environ: Mapping[str, str], cwd: str, parent_fd: int) -> None:
    """Make this fork of a server a process with a session, streams, an environment and a directory.

    It ends with its parent: ``parent_fd`` is a pipe whose other end the parent alone holds.
    """
    os.setsid()
    _die_at_the_end_of(parent_fd)
    gc.freeze()  # no collection is to look at what the server imported
    for standard_fd, received_fd in enumerate(streams, 1):
        os.dup2(received_fd, standard_fd)
        os.close(received_fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    multiprocessing.set_start_method(None, force=True)
    tempfile.tempdir = None  # the server may have looked for the directory of another TMPDIR
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # every process draws other numbers
        if environ.get("OMP_NUM_THREADS", "").isdecimal():
            torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _die_at_the_end_of(pipe_fd: int) -> None:
    """Have the end of the process that holds the pipe's other end end this process and its process group.

    ``prctl(PR_SET_PDEATHSIG)`` would follow the thread that asked for the fork, which may end long before the parent
    does, and would spare the children of this process.
    """
    if sys.platform == "linux":
        # The kernel sends SIGKILL once the last writer is gone: that needs neither a thread nor the interpreter lock.
        fcntl.fcntl(pipe_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe_fd, fcntl.F_SETFL, fcntl.fcntl(pipe_fd, fcntl.F_GETFL) | os.O_ASYNC)
    else:
        threading.Thread(target=_end_with, args=(pipe_fd,), daemon=True).start()
    if connection.wait([pipe_fd], 0):  # it ended before any of this was in place
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _end_with(pipe_fd: int) -> None:
    connection.wait([pipe_fd])
    os.killpg(os.getpgrp(), signal.SIGKILL)
