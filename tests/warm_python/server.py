"""The process that forks for `Server.executable`. It starts no thread: a fork would leave it behind, with what it held.

Run by name (`python -c`), for the `__main__` of the process is that of the fork's program.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

REQUEST_BYTES = 1 << 20  # an environment, above all
REQUEST_FDS = 64
# Of the variables that are read at a start: what is taken over by a fork, read later, or no more than what torch logs.
READ_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_CPP_LOG_LEVEL")


class Fork(NamedTuple):
    """``end``: a descriptor that can be read once the process has ended. ``client``: the program that asked for it."""

    pid: int
    end: int
    client: socket.socket


def read_at_start(environ: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    names = [name for name in environ if name.startswith(prefixes) and not name.startswith(READ_LATER)]
    return {name: environ[name] for name in names}


class Forking:
    """Serves until the tests end. In a fork `serve` returns what is asked for, and its descriptors.

    ``environ``: what this process has read at its start, of variables with these ``prefixes``.
    """

    def __init__(self, listener: socket.socket, environ: Mapping[str, str], prefixes: tuple[str, ...]) -> None:
        self._listener, self._environ, self._prefixes = listener, environ, prefixes
        self._forks: dict[int, Fork] = {}  # by the descriptors of both
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._poll.register(listener, select.POLLIN)

    def serve(self) -> tuple[dict[str, Any], list[int]]:
        while True:
            for ready, _ in self._poll.poll():
                if ready == 0:
                    self._end()
                elif ready == self._listener.fileno():
                    if asked := self._fork(self._listener.accept()[0]):
                        return asked
                elif ready == self._forks[ready].end:
                    self._reap(self._forks[ready])
                else:  # the program is gone, which a signal has ended, say
                    self._poll.unregister(ready)
                    os.kill(self._forks.pop(ready).pid, signal.SIGKILL)

    def _fork(self, client: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
        message, fds, _, _ = socket.recv_fds(client, REQUEST_BYTES, REQUEST_FDS)
        if message and self._can_be_forked(request := json.loads(message)):
            pid = os.fork()
            if pid == 0:
                return request, fds
            fork = Fork(pid, os.pidfd_open(pid), client)
            for fd in (fork.end, client.fileno()):
                self._forks[fd] = fork
                self._poll.register(fd, select.POLLIN)
            tell(client, {"pid": pid})
        else:
            tell(client, {"pid": None})
            client.close()
        for fd in fds:
            os.close(fd)
        return None

    def _can_be_forked(self, request: Mapping[str, Any]) -> bool:
        """Whether the program finds what it would find in an interpreter of its own."""
        words = [word for word in request["arguments"] if word != "-u"]
        paths = request["environ"].get("PYTHONPATH", "").split(os.pathsep)
        customized = any(os.path.exists(os.path.join(path, "sitecustomize.py")) for path in paths if path)
        understood = bool(words) and (words[0] in ("-c", "-m") or not words[0].startswith("-"))
        return understood and not customized and read_at_start(request["environ"], self._prefixes) == self._environ

    def _reap(self, fork: Fork) -> None:
        _, status = os.waitpid(fork.pid, 0)
        tell(fork.client, {"exit_code": os.waitstatus_to_exitcode(status)})
        for fd in (fork.end, fork.client.fileno()):
            if self._forks.pop(fd, None):
                self._poll.unregister(fd)
        fork.client.close()
        os.close(fork.end)

    def _end(self) -> None:
        for fork in self._forks.values():
            os.kill(fork.pid, signal.SIGKILL)
        os._exit(0)


def tell(client: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        client.send(json.dumps(answer).encode())


def inherit(fds: Sequence[int], wanted: Sequence[int]) -> None:
    """Have these descriptors under the numbers that the program has them under, and no other."""
    above = max([*fds, *wanted]) + 1
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in held:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name))
    for fd, number in zip(held, wanted, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def enter(network: int) -> None:
    """The network namespace of the program."""
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(network, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def become(request: dict[str, Any], fds: list[int]) -> None:
    """The interpreter that was asked for, up to its program."""
    os.setsid()
    enter(fds[0])
    inherit(fds[1:], request["fds"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    if "-u" in request["arguments"][:1] or os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.modules["torch"].default_generator.seed()  # each process draws its own numbers, as each does that starts
    sys.modules["numpy"].random.seed()


def program(arguments: Sequence[str], site: Sequence[str]) -> Any:
    """The code of ``python ARGUMENTS``, for `__main__` to run, which looks as it would there."""
    first, *others = [word for word in arguments[:1] if word != "-u"] + list(arguments[1:])
    names = vars(sys.modules["__main__"])
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    sys.path[:] = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path += site
    if first == "-m":
        sys.argv[:] = others
        sys.path.insert(0, os.getcwd())
        return f"__import__('runpy')._run_module_as_main({others[0]!r})"
    if first == "-c":
        sys.argv[:] = ["-c", *others[1:]]
        sys.path.insert(0, "")
        return others[0]
    path = os.path.abspath(first)
    sys.argv[:] = [first, *others]
    sys.path.insert(0, os.path.dirname(path))
    names["__file__"] = path
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec")


class End:
    """Around a fork's program: leaves where the interpreter would begin to take itself apart.

    Its exit function is the first that is registered, so the last that runs. A program that keeps something in `sys` is
    taken apart: that may be there to be the last that goes.
    """

    status: int | None = None  # that the process ends with; None: it ends as Python has it end
    whole = False

    def __enter__(self) -> None:
        self._in_sys = {*vars(sys), "last_exc", "last_type", "last_value", "last_traceback"}
        atexit.register(self._leave)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.status = 0
        elif isinstance(error, SystemExit):
            self.status = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        elif not isinstance(error, KeyboardInterrupt):  # which ends by its signal
            self.status = 1

    def _leave(self) -> None:
        if self.status is None or End.whole or vars(sys).keys() - self._in_sys:
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except Exception:  # of which Python makes a status of its own
            return
        os._exit(self.status)


def main(listener_fd: int, executable: str, preload: Sequence[str], prefixes: tuple[str, ...], ends_whole: str) -> Any:
    """Returns in the forks alone, what they run."""
    site, environ = sys.path[1:], read_at_start(os.environ, prefixes)  # which torch adds to
    for module in ("torch", "torch.distributed", "numpy", *preload):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is shared with every process stays shared
    request, fds = Forking(socket.socket(fileno=listener_fd), environ, prefixes).serve()
    become(request, fds)
    End.whole = ends_whole in os.environ
    sys.executable = executable
    return program(request["arguments"], site)
