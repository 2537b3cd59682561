"""One rank's process, seen from the parent: start it, send to it, read its answers, kill it, and leave nothing behind.

The two files of a rank (stderr, stacks) have no name in the file system: a parent killed by SIGKILL leaves none.
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
from collections.abc import Mapping
from typing import IO

from ddpstats.testing import _rank_main
from ddpstats.testing._forkserver import fork
from ddpstats.testing._rank_wire import END, FrameReader, send_frame

_TAIL_BYTES = 8000
_STACK_BYTES = 50_000
_EXIT_GRACE_SEC = 5.0
_REAP_SEC = 30.0  # a process that the kernel holds, in a driver for example, dies later or never


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
            try:
                self._process = fork(
                    _rank_main.main,
                    *(rank, world_size, store_port),
                    environ=rank_environ(rank, world_size, store_port, env),
                    stdout=1,
                    stderr=self._stderr.fileno(),
                    control_fd=theirs.fileno(),
                    stack_fd=self._stack.fileno(),
                )
            finally:
                theirs.close()
            self._resources = resources.pop_all()

    def fileno(self) -> int:
        """For `select`: readable when something came or the rank is gone."""
        return self._control.fileno()

    @property
    def exit_code(self) -> int | None:
        """The exit code once the process was seen to end; negative for a signal."""
        return self._process.returncode

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
            os.kill(self._process.pid, signal.SIGUSR1)

    def stack_bytes(self) -> int:
        """Return how many bytes of the stack are written by now."""
        return _size_bytes(self._stack)

    def stack(self) -> str:
        """Return what faulthandler wrote, as text."""
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
            self._process.wait(max(deadline - time.monotonic(), 0))
            self._kill_group()

    def wait_for_death(self) -> None:
        """A rank whose socket closed is about to end: give it a moment, so that its own exit code is seen."""
        self.wait(time.monotonic() + _EXIT_GRACE_SEC)

    def kill(self) -> None:
        """Kill the rank with its whole process group, if it still runs. `reap` waits for it."""
        if not self._has_exited():
            self._process.kill()

    def reap(self) -> None:
        """Wait for a killed rank, half a minute at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SEC)

    def release(self) -> None:
        """Close the socket, the pipe and the files."""
        self._resources.close()

    def _has_exited(self) -> bool:
        """Return whether the process has ended; its own children are killed the moment that is first seen."""
        if self._process.returncode is not None:
            return True
        if self._process.poll() is None:
            return False
        # The number is ours no longer, but process ids are handed out in turn: it is not reused this instant, and
        # as long as a child of the rank is left the kernel does not reuse it at all.
        self._kill_group()
        return True

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def rank_environ(rank: int, world_size: int, store_port: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment, with what torchrun would set for the rank, and with ``env`` on top of both."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        # The parent serves the store: a second `init_process_group` by env:// connects to it, as under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        **env,
    }


def _size_bytes(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size
