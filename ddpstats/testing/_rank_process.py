"""One rank's process, seen from the parent: start, send, read what came, kill, and leave nothing behind.

Plain `subprocess`, not `multiprocessing`: the latter's spawn start leaves a resource_tracker process with the parent,
runs the user's `__main__` again, and has no place for a rank's stderr. The two files of a rank (stderr, stacks) have no
name in the file system, so that even a parent killed by SIGKILL leaves none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from typing import IO

from ddpstats.testing._rank_main import RankSpec
from ddpstats.testing._rank_server import Forked, RankServer, ServerGone
from ddpstats.testing._rank_wire import END, FrameReader, send_frame

_TAIL_BYTES = 8000
_STACK_BYTES = 50_000
_EXIT_GRACE_SEC = 5.0


class RankProcess:
    """A running rank. Not thread-safe. Every way out goes through `kill` (or `stop`) and then `release`."""

    def __init__(self, rank: int, world_size: int, store_port: int, env: Mapping[str, str]) -> None:
        self.rank = rank
        self._reader = FrameReader()
        self._stderr_start = 0
        self.ended = False
        with contextlib.ExitStack() as resources:
            self._control, theirs = socket.socketpair()
            resources.enter_context(self._control)
            self._stderr = resources.enter_context(tempfile.TemporaryFile())
            self._stack = resources.enter_context(tempfile.TemporaryFile())
            life_fd, life_write_fd = os.pipe()
            self._life = resources.enter_context(open(life_write_fd, "wb", buffering=0))
            spec = RankSpec(rank, world_size, store_port, theirs.fileno(), life_fd, self._stack.fileno())
            try:
                self._popen = self._start(spec, rank_environ(spec, env))
            finally:
                theirs.close()
                os.close(life_fd)
            self._resources = resources.pop_all()
        _started.add(self)

    def _start(self, spec: RankSpec, environ: dict[str, str]) -> subprocess.Popen[bytes] | Forked:
        server = RankServer.current
        if server is not None and server.serves(environ):
            fds = (spec.control_fd, spec.life_fd, spec.stack_fd)
            with contextlib.suppress(ServerGone):
                return server.start(spec[:3], environ, self._stderr.fileno(), fds)
        return subprocess.Popen(
            [sys.executable, "-c", _bootstrap(spec)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stderr=self._stderr,
            pass_fds=(spec.control_fd, spec.life_fd, spec.stack_fd),
            start_new_session=True,
        )

    def disown(self) -> None:
        """In a forked copy of the parent: let go of what tells the rank that its parent lives."""
        self._life.close()
        self._control.close()

    def fileno(self) -> int:
        """For `select`: readable when something came or the rank is gone."""
        return self._control.fileno()

    @property
    def exit_code(self) -> int | None:
        """The exit code once the process was seen to end; negative for a signal."""
        return self._popen.returncode

    @property
    def frame(self) -> bytes | None:
        """The rank's answer to the last `send`; None until it is whole."""
        return self._reader.frame

    def expect(self) -> None:
        """Forget the last answer: what comes next is a new one."""
        self._reader = FrameReader()

    def send(self, payload: bytes, deadline: float) -> None:
        """Send one frame, blocking until `deadline` (monotonic seconds) at most.

        A rank that is gone or does not read is not an error here: whoever waits for the answer will find out.
        """
        self.expect()
        self._control.settimeout(max(deadline - time.monotonic(), 0.001))
        with contextlib.suppress(OSError):
            send_frame(self._control, payload)
        self._control.setblocking(False)

    def pump(self) -> None:
        """Take what has come, without blocking. Sets `frame`, or `ended` if the rank is gone without one."""
        gone = self._has_exited()  # asked first, so that what it sent before it went is still read below
        with contextlib.suppress(BlockingIOError):
            while self.frame is None:
                chunk = self._read_chunk()
                if not chunk:
                    gone = True
                    break
                self._reader.feed(chunk)
                self._stderr_start = _size_bytes(self._stderr)
        self.ended = gone and self.frame is None

    def _read_chunk(self) -> bytes:
        self._control.setblocking(False)
        try:
            return self._control.recv(min(self._reader.missing_bytes, 1 << 20))
        except ConnectionError:
            return b""

    def ask_for_stack(self) -> None:
        """Have faulthandler write every thread's stack. Only for a rank that has said "ready"."""
        if not self._has_exited():
            os.kill(self._popen.pid, signal.SIGUSR1)

    def stack_bytes(self) -> int:
        """How much of the stack is written by now."""
        return _size_bytes(self._stack)

    def stack(self) -> str:
        """What faulthandler wrote, as text."""
        return os.pread(self._stack.fileno(), _STACK_BYTES, 0).decode("utf-8", "replace")

    def stderr_tail(self) -> str:
        """The end of what the rank wrote to stderr since its last answer."""
        start = max(self._stderr_start, _size_bytes(self._stderr) - _TAIL_BYTES)
        return os.pread(self._stderr.fileno(), _TAIL_BYTES, start).decode("utf-8", "replace").strip()

    def ask_to_end(self) -> None:
        """Ask the rank to leave by itself; does not wait."""
        self.send(END, time.monotonic() + 1.0)

    def wait(self, deadline: float) -> None:
        """Give the rank until `deadline` (monotonic seconds) to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(deadline - time.monotonic(), 0))
            self._kill_group()

    def wait_for_death(self) -> None:
        """A rank whose socket closed is about to end: give it a moment, so that its own exit code is seen."""
        self.wait(time.monotonic() + _EXIT_GRACE_SEC)

    def kill(self) -> None:
        """Kill the rank with its whole process group, if it still runs. `reap` waits for it."""
        if not self._has_exited():
            self._kill_group()

    def reap(self) -> None:
        """Wait for a killed rank."""
        self._popen.wait()

    def release(self) -> None:
        """Close the socket, the pipe and the files. The process must have been reaped."""
        self._resources.close()

    def _has_exited(self) -> bool:
        """Whether the process has ended; its own children are killed the moment that is first seen."""
        if self._popen.returncode is not None:
            return True
        if self._popen.poll() is None:
            return False
        # The number is ours no longer, but process ids are handed out in turn: it is not reused this instant, and
        # as long as a child of the rank is left the kernel does not reuse it at all.
        self._kill_group()
        return True

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)


# A copy of the parent, as multiprocessing's fork makes it, must not keep the ranks alive when the parent is gone.
_started: weakref.WeakSet[RankProcess] = weakref.WeakSet()


def _disown_all() -> None:
    for process in _started:
        process.disown()


os.register_at_fork(after_in_child=_disown_all)


def rank_environ(spec: RankSpec, env: Mapping[str, str]) -> dict[str, str]:
    """The parent's environment, what torchrun would set, and on top of both the caller's own `env`."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        **os.environ,
        "RANK": str(spec.rank),
        "LOCAL_RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(spec.store_port),
        # The store's server is ours: a second `init_process_group` by env:// connects to it, as under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        **env,
    }


def _bootstrap(spec: RankSpec) -> str:
    # sys.path is handed on before the first import, so that the function's module is found as it is found here.
    paths = [os.path.abspath(path) for path in sys.path]
    return (
        f"import sys; sys.path[:] = {paths!r}\n"
        "from ddpstats.testing._rank_main import RankSpec, main\n"
        f"main(RankSpec{tuple(spec)!r})"
    )


def _size_bytes(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size
