"""Ranks that start in a fraction of a second: each is forked from a process that has imported torch before.

An interpreter that imports torch costs seconds of a core, and a test with real ranks little else. Inside of
``with RankServer(...)``, `run_ranks` and `RankPool` of this process ask the server for their processes. What an
interpreter or torch reads from the environment when it starts has to be the server's, or a fresh one is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ddpstats._base import config

_FORKED = Path(__file__).with_name("_forked_python.py")
READ_AT_START = (
    "PYTHON",
    "LD_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "MALLOC_",
    "TORCH",
    "PYTORCH_",
    "CUDA_",
)
# sys.path is handed on as it is; what torchrun tells a rank is for the process group and for the rank's end
_NOT_READ = ("PYTHONPATH", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
_ANSWER_BYTES = 4096
START_TIMEOUT_SEC = 120.0  # until every rank has imported torch: minutes on a loaded machine, so not the caller's limit


class ServerGone(Exception):
    """The server has ended, or cannot do what it is asked."""


class RankServer:
    """Starts processes by fork. A context manager; of the process that started it, not of its copies.

    Args:
        environ: the environment of the ranks, as far as it matters when a process starts.
        preload: modules that all of them find imported. Those of this package may be among them: to import
            them takes longer than a fork.
    """

    current: RankServer | None = None

    def __init__(self, environ: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        self._environ, self._preload = dict(environ), tuple(preload)
        self._at_start = self._read_at_start(environ)
        self._owner_pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._exit_codes: dict[int, int] = {}
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def _connected(self) -> socket.socket:
        """The way to the process, which the first rank that is wanted starts."""
        if self._socket is not None:
            return self._socket
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            f"import sys; sys.path[:] = {_paths()!r}\n"
            "names = {'__name__': '_forked_python'}\n"
            f"exec(compile({_FORKED.read_text()!r}, {str(_FORKED)!r}, 'exec'), names)\n"
            f"request, fds = names['main']({theirs.fileno()}, {self._preload!r})\n"
            "from ddpstats.testing._rank_main import RankSpec, main\n"
            "main(RankSpec(*request['spec'], *fds[2:]))\n"
            "names['end']()\n"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={name: value for name, value in self._environ.items() if name != config.GUARD},  # of ranks alone
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # an interrupt from the keyboard is not for it
            )
        return self._socket

    def serves(self, environ: Mapping[str, str]) -> bool:
        """Whether a process of this environment can be forked here."""
        here = sys.platform == "linux" and os.getpid() == self._owner_pid and not self._closed
        return here and self._read_at_start(environ) == self._at_start

    def _read_at_start(self, environ: Mapping[str, str]) -> dict[str, str]:
        names = [name for name in environ if name.startswith(READ_AT_START) and name not in _NOT_READ]
        return {name: environ[name] for name in names}

    def start(self, spec: Sequence[int], environ: Mapping[str, str], stderr_fd: int, fds: Sequence[int]) -> Forked:
        """A rank: ``fds`` follow the numbers of ``spec``. Raises `ServerGone`."""
        request = {"spec": list(spec), "environ": dict(environ), "paths": _paths(), "cwd": os.getcwd()}
        with self._lock:
            try:
                socket.send_fds(self._connected(), [json.dumps(request).encode()], [1, stderr_fd, *fds])
                while (pid := self._read(START_TIMEOUT_SEC)) is None:
                    pass
            except (ServerGone, OSError) as error:
                self.close()  # an answer that came later would be taken for that of another rank
                raise ServerGone from error
        return Forked(pid, self)

    def exit_code_of(self, pid: int, wait_sec: float) -> int | None:
        """The exit code of a rank, once; None if it still runs after so many seconds."""
        deadline = time.monotonic() + wait_sec
        while True:
            with self._lock:
                with contextlib.suppress(BlockingIOError):
                    while pid not in self._exit_codes:
                        self._read(0.0)
                if pid in self._exit_codes:
                    return self._exit_codes.pop(pid)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            poll = select.poll()
            poll.register(self._connected(), select.POLLIN)
            poll.poll(1000 * min(left, 0.05))  # another thread may read what this one waits for

    def _read(self, timeout_sec: float | None) -> int | None:
        """Take one answer: the pid of a process that was started, or None for one that has ended."""
        server = self._connected()
        server.settimeout(timeout_sec)
        message = server.recv(_ANSWER_BYTES)
        if not message:
            raise ServerGone
        answer = json.loads(message)
        if answer["exit_code"] is None:
            return int(answer["pid"])
        self._exit_codes[answer["pid"]] = answer["exit_code"]
        return None

    def __enter__(self) -> RankServer:
        RankServer.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        RankServer.current = None
        self.close()

    def close(self) -> None:
        """End the server; the ranks that it has started do not end with it. Idempotent."""
        self._closed = True
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.kill()  # nothing of it is to be saved, and its ranks do not end with it
            self._process.wait()


class Forked:
    """A process that the server started, as far as `subprocess.Popen` is needed of it."""

    def __init__(self, pid: int, server: RankServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._ended_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired`."""
        while True:
            code = self._ended_within(60.0 if timeout is None else timeout)
            if code is not None:
                return code
            if timeout is not None:
                raise subprocess.TimeoutExpired("a forked rank", timeout)

    def _ended_within(self, seconds: float) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._server.exit_code_of(self.pid, seconds)
            except (ServerGone, OSError):  # then nobody knows how it ended; that it does is certain
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, 9)
                self.returncode = -9
        return self.returncode


def _paths() -> list[str]:
    return [os.path.abspath(path) for path in sys.path]
