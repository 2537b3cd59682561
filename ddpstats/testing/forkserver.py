"""Processes forked from one that has already imported torch, by the fork server of ``multiprocessing``.

An interpreter that imports torch costs seconds of a core; a fork of one that has imported it costs milliseconds.

1. The first `fork` starts the server: it imports torch and the modules that `preload` names, and then only forks.
2. A fork becomes the leader of a session of its own, takes the given streams, environment, directory and ``sys.path``,
   and calls one function.
3. The server sends its exit status back over a pipe.
4. The end of the parent, by SIGKILL too, ends the server, its forks and their process groups.

Environment variables that Python or torch read while they start (`READ_AT_START`) cannot be changed in a fork:
processes that differ in one of them are forked from another server. `multiprocessing.Process` is not used: it runs the
caller's ``__main__`` again in each process, and has no place for a stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, reduction
from typing import Any, NoReturn

from ddpstats._base import config

READ_AT_START = (
    *("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_"),
    *("MALLOC_", "TORCH", "PYTORCH_", "CUDA_", "DYLD_"),
)
"""Prefixes of environment variables that Python or torch read when they start."""
_READ_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_CPP_LOG_LEVEL")
START_TIMEOUT_SEC = 120.0  # importing torch takes minutes on a loaded machine
_LOST = -signal.SIGKILL
_MOST_IDLE = 4
_LONG_PATH = 60
_NO_ANSWER = (
    f"the process that forks ranks has ended, or did not answer within {START_TIMEOUT_SEC:g} s: "
    "see what it wrote to the stderr of this process"
)

_preloaded = ["torch", "torch.distributed", "ddpstats.testing.rank"]
_servers: dict[tuple[int, frozenset[tuple[str, str]]], forkserver.ForkServer] = {}
_lock = threading.Lock()


def preload(modules: Sequence[str]) -> None:
    """Have servers that start from now on import these modules, too. Modules that cannot be imported are left out."""
    _preloaded.extend(name for name in modules if name not in _preloaded)


def fork(
    function: Callable[..., None],
    *args: Any,
    environ: Mapping[str, str],
    stdout: int,
    stderr: int,
    cwd: str | os.PathLike[str] = ".",
    **fds: int,
) -> Forked:
    """Call ``function(*args, **fds)`` in a new process, with the ``sys.path`` of this one.

    Args:
        function: a function at the top level of an importable module.
        args: arguments that pickle.
        environ: all environment variables of the process.
        stdout, stderr: file descriptors for its standard streams; stdin is empty.
        cwd: its current directory.
        fds: file descriptors. The function gets them under numbers of the new process.
    """
    program = _Program(pickle.dumps((function, args)), dict(environ), tuple(fds))
    preparation = {"sys_path": [os.path.abspath(path) for path in sys.path], "dir": os.path.abspath(cwd)}
    life_fd, life_write_fd = os.pipe()
    try:
        with _lock:
            server = _server_for(environ)
            status_fd, data_fd = _connect(server, [stdout, stderr, life_fd, *fds.values()])
    except BaseException:
        os.close(life_write_fd)
        raise
    finally:
        os.close(life_fd)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(BrokenPipeError))  # outside: closing the pipe writes what is left
        data = stack.enter_context(open(data_fd, "wb"))
        forked = Forked(server, status_fd, life_write_fd)
        reduction.dump(preparation, data)
        reduction.dump(program, data)
    return forked


def _server_for(environ: Mapping[str, str]) -> forkserver.ForkServer:
    """Return this process's server whose start-up variables are those of ``environ``. The caller holds the lock."""
    at_start = {name: value for name, value in environ.items() if _is_read_at_start(name)}
    key = os.getpid(), frozenset(at_start.items())
    server = _servers.pop(key, None)
    if server is None:
        _end_idle_servers()
        server = forkserver.ForkServer()
        server.set_forkserver_preload(_preloaded)
    _servers[key] = server  # the last is the one that was used last
    start_method = multiprocessing.get_start_method(allow_none=True)
    with _environment(at_start), _short_temporary_directory():
        server.ensure_running()
    if not start_method:  # to start a server chooses one for the whole process; that is for the program to do
        multiprocessing.set_start_method(None, force=True)
    return server


def _end_idle_servers() -> None:
    """Each holds a torch of its own: of those without a running fork, keep the few that were used last."""
    used = {process._server for process in _running if process.returncode is None}
    idle = [key for key, server in _servers.items() if server not in used]
    for key in idle[: 1 - _MOST_IDLE]:
        _end(_servers.pop(key))


def _connect(server: forkserver.ForkServer, fds: Sequence[int]) -> tuple[int, int]:
    """Ask for a fork. On macOS, and from Python 3.14 on, this waits until the server has imported all and answers."""
    timer = threading.Timer(START_TIMEOUT_SEC, _kill, [server])
    timer.daemon = True
    timer.start()
    try:
        return server.connect_to_new_process(fds)
    except (ConnectionError, EOFError, RuntimeError) as error:  # RuntimeError: what `sendfds` raises on macOS
        _end(server)
        raise RuntimeError(_NO_ANSWER) from error
    finally:
        timer.cancel()
        timer.join()


def _end(server: forkserver.ForkServer) -> None:
    """If it is used again, it starts anew."""
    _kill(server)
    with contextlib.suppress(OSError):
        server._stop()  # type: ignore[attr-defined]


def _kill(server: forkserver.ForkServer) -> None:
    pid: int | None = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_read_at_start(name: str) -> bool:
    return name.startswith(READ_AT_START) and not name.startswith(_READ_LATER)


@contextlib.contextmanager
def _environment(at_start: Mapping[str, str]) -> Iterator[None]:
    """Set the environment that a new server inherits: `forkserver` has no argument for it.

    A guard that DDPSTATS_GUARD asks for begins in the ranks, not in the server. PYTHONSAFEPATH, which Python 3.10 does
    not know: modules of the current directory are for the server only if they are for this process.
    """
    before = dict(os.environ)
    for name in before:
        if _is_read_at_start(name) or name == config.GUARD:
            del os.environ[name]
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    os.environ.update(at_start, PYTHONPATH=paths, PYTHONSAFEPATH="1")
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _short_temporary_directory() -> Iterator[None]:
    """The server's socket is in the temporary directory, and the path of a socket has about 100 bytes at most."""
    before = tempfile.tempdir
    if len(tempfile.gettempdir()) > _LONG_PATH and os.path.isdir("/tmp"):
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = before


class _Program:
    """The call that a fork makes. `multiprocessing.spawn` unpickles it there and calls `_bootstrap`."""

    def __init__(self, call: bytes, environ: dict[str, str], fds: tuple[str, ...]) -> None:
        self.call, self.environ, self.fds = call, environ, fds

    def _bootstrap(self, parent_sentinel: int) -> NoReturn:
        os.close(parent_sentinel)
        inherited_fds: Sequence[int] = forkserver.get_inherited_fds() or []
        stdout, stderr, life_fd, *fds = inherited_fds
        os.setsid()
        _die_with_parent(life_fd)
        gc.freeze()  # no collection is to look at what the server imported
        for fd, standard_fd in ((stdout, 1), (stderr, 2)):
            os.dup2(fd, standard_fd)
            os.close(fd)
        for fd in fds:
            os.set_inheritable(fd, False)
        os.environ.clear()
        os.environ.update(self.environ)
        tempfile.tempdir = None  # the server may have looked for the directory of its own TMPDIR
        if "torch" in sys.modules:  # it may be that the server could not import it; the function's import says why
            sys.modules["torch"].default_generator.seed()  # every process draws numbers of its own
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        status = 0
        try:
            function, args = pickle.loads(self.call)  # here, where an error goes to the process's own stderr
            function(*args, **dict(zip(self.fds, fds, strict=True)))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        end(status)


def end(status: int) -> NoReturn:
    """End this fork as an interpreter ends, without clearing its modules, which takes ten times as long as the fork."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _die_with_parent(life_fd: int) -> None:
    """Have the end of the parent, which alone holds the pipe's other end, end this process and its process group.

    ``prctl(PR_SET_PDEATHSIG)`` would follow the thread that asked for the fork, which may end long before the parent
    does, and would spare the children of this process.
    """
    os.set_inheritable(life_fd, False)
    if sys.platform == "linux":
        # The kernel sends SIGKILL once the last writer is gone: that needs neither a thread nor the interpreter lock.
        fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    else:
        threading.Thread(target=_end_with_pipe, args=(life_fd,), daemon=True).start()
    poll = select.poll()  # not select(): the number may be beyond 1024
    poll.register(life_fd)
    if poll.poll(0):  # the parent died before any of this was in place
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _end_with_pipe(life_fd: int) -> None:
    os.read(life_fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


class Forked:
    """A forked process, with the part of `subprocess.Popen` that its owners use.

    It ends with this process. Not thread-safe.
    """

    def __init__(self, server: forkserver.ForkServer, status_fd: int, life_write_fd: int) -> None:
        self.returncode: int | None = None
        self._server, self._status_fd, self._life_write_fd = server, status_fd, life_write_fd
        try:
            pid = self._read(START_TIMEOUT_SEC)
            if pid is None:
                with _lock:
                    _end(server)
                raise RuntimeError(_NO_ANSWER)
        except BaseException:
            self._close()
            raise
        self.pid = pid
        with _lock:
            _running.add(self)

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs; negative for a signal."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises `subprocess.TimeoutExpired`."""
        status = self._wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return status

    def kill(self) -> None:
        """Kill it with its process group, which outlives it where it left processes of its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                if self.poll() is None:  # it does not lead a group yet
                    os.kill(self.pid, signal.SIGKILL)

    def _wait(self, timeout_sec: float | None) -> int | None:
        if self.returncode is None and connection.wait([self._status_fd], timeout_sec):
            status = self._read(None)
            if status is None:  # the server was killed: how the process ends cannot be known, so end it
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            self.returncode = _LOST if status is None else status
            self._close()
        return self.returncode

    def _read(self, timeout_sec: float | None) -> int | None:
        """Return the next number that the server sent; None if none comes in time, or the server is gone."""
        if not connection.wait([self._status_fd], timeout_sec):
            return None
        try:
            number: int = forkserver.read_signed(self._status_fd)
        except EOFError:
            return None
        return number

    def _close(self) -> None:
        os.close(self._status_fd)
        os.close(self._life_write_fd)

    def _disown(self) -> None:
        """Let go of the process in a forked copy of its parent, which must not keep it alive."""
        if self.returncode is None:
            self.returncode = _LOST
            self._close()


_running: weakref.WeakSet[Forked] = weakref.WeakSet()


def _disown_all() -> None:
    """Have a forked copy of this process neither keep the forks and their servers alive nor wait for its threads."""
    global _lock
    _lock = threading.Lock()
    for process in _running:
        process._disown()
    for server in _servers.values():
        alive_fd: int | None = getattr(server, "_forkserver_alive_fd", None)
        if alive_fd is not None:
            os.close(alive_fd)
    _servers.clear()


os.register_at_fork(after_in_child=_disown_all)
