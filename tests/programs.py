"""Python programs in processes of their own: forked from a server that has imported torch, or fresh interpreters.

A fork runs what ``python ARGUMENTS`` runs, and ends as that ends. Two things differ: what an interpreter becomes while
it starts (options, ``sitecustomize``, PYTHONHASHSEED), and /proc, which shows the server's environment. A program that
is about one of these is started with ``fresh=True``. What a fork starts by ``sys.executable`` or multiprocessing is
forked, too (`tests.forked_python`): torchrun's ranks, for example.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ddpstats.testing import forkserver
from ddpstats.testing.ranks import rank_environ, serve_store

LIMIT_SEC = 150.0
_TERM_AFTER_SEC = 3.0  # torchrun waits a tenth of that, and then it is chance what a rank ends with


class Program:
    """A running ``python ARGUMENTS``, in a new session; its output goes to files. Ends with its ``with`` block.

    Args:
        arguments: what follows ``python`` on the command line.
        environ: all environment variables. It can import what can be imported here.
        prefix: a command that starts the interpreter, such as ``ip netns exec NAME``; implies ``fresh``.
        fresh_children: whether what a fork starts by ``sys.executable`` are interpreters; otherwise `forked_python`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        cwd: str | Path = ".",
        fresh: bool = False,
        prefix: Sequence[str] = (),
        fresh_children: bool = False,
    ) -> None:
        self.arguments = list(arguments)
        self._files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `kill`
        out, err = (file.fileno() for file in self._files)
        paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        paths += map(os.path.abspath, sys.path)
        own = {"OMP_NUM_THREADS": "1", **environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._process: forkserver.Fork | subprocess.Popen[bytes]
        if fresh or prefix:
            command = [*prefix, sys.executable, *arguments]
            self._process = subprocess.Popen(command, env=own, stdout=out, stderr=err, cwd=cwd, start_new_session=True)
        else:
            from tests import forked_python  # which imports this module

            executable = sys.executable if fresh_children else forked_python.path()
            self._process = forkserver.Fork(
                *(become, self.arguments, paths, executable), environ=own, stdout=out, stderr=err, cwd=cwd
            )
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs; negative for a signal."""
        return self._process.exitcode if isinstance(self._process, forkserver.Fork) else self._process.poll()

    def wait(self, timeout_sec: float = LIMIT_SEC) -> int:
        """Return the exit status. Raises `subprocess.TimeoutExpired`."""
        if not isinstance(self._process, forkserver.Fork):
            return self._process.wait(timeout_sec)
        self._process.join(timeout_sec)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout_sec)
        return self._process.exitcode

    def output(self) -> str:
        """Return what it has written to stdout so far."""
        return _text(self._files[0].fileno())

    def errors(self) -> str:
        """Return what it has written to stderr so far."""
        return _text(self._files[1].fileno())

    def finish(self, timeout_sec: float = LIMIT_SEC) -> subprocess.CompletedProcess[str]:
        """Wait for its end, and kill what is left of its session."""
        try:
            status = self.wait(timeout_sec)
            return subprocess.CompletedProcess(self.arguments, status, self.output(), self.errors())
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it with its session, and close its files. May be called twice."""
        if isinstance(self._process, forkserver.Fork):
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.wait(20)
        for file in self._files:
            file.close()

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended. A fork may be reaped by its server between the question and the signal."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()


def _text(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")


def run(
    arguments: Sequence[str],
    *,
    timeout: float = LIMIT_SEC,
    cwd: str | Path = ".",
    fresh: bool = False,
    fresh_children: bool = False,
    environ: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` to its end; ``environ`` comes on top of this process's environment."""
    all_environ = {**os.environ, **(environ or {})}
    return Program(arguments, all_environ, cwd=cwd, fresh=fresh, fresh_children=fresh_children).finish(timeout)


def ddpstats(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``ddpstats ARGUMENTS`` to its end."""
    return run(["-m", "ddpstats", *arguments], environ=environ)


def without_gloo(stdout: str) -> str:
    """Leave out the line that gloo prints for each group, up to torch 2.10."""
    return "".join(line for line in stdout.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that stays bound, so that no other program gets it; a store may listen on it meanwhile.

    Linux lets two sockets with SO_REUSEADDR bind one port as long as at most one of them listens.
    """
    with socket.socket(socket.AF_INET6) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("::", 0))
        yield holder.getsockname()[1]


# -- programs on ranks ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a program's ranks. ``stdout`` and ``stderr`` are those of all ranks.

    ``first`` is what torchrun reports as the root cause, in one line.
    """

    statuses: list[int]
    stdout: str
    stderr: str
    first: str = ""


def by_torchrun(script: str, *args: str, ranks: int = 2, **env: str) -> Ended:
    """Run ``torchrun SCRIPT ARGS...``, whose ranks are interpreters, with all that happens when one ends.

    The statuses are of those ranks that did not end with 0.
    """
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script, *args]
    return of_torchrun(run(command, fresh_children=True, environ=env))


def of_torchrun(done: subprocess.CompletedProcess[str]) -> Ended:
    """Read what torchrun's stderr says of the ranks."""
    statuses = [int(status) for status in re.findall(r"exitcode +: (-?\d+)", done.stderr)]
    assert bool(statuses) == bool(done.returncode), done.stderr
    of_the_ranks = done.stderr.partition("failed (exitcode")[0]
    return Ended(
        statuses, done.stdout, of_the_ranks, *re.findall("traceback : (.*)", done.stderr.rpartition("Root Cause")[2])
    )


def on_ranks(script: str, *args: str, ranks: int = 2, limit_sec: float = LIMIT_SEC, **env: str) -> Ended:
    """Run the ranks of ``torchrun SCRIPT ARGS...`` without torchrun, and read what it would report of them."""
    store = serve_store()
    with tempfile.TemporaryDirectory() as scratch:
        paths = [Path(scratch, str(rank)) for rank in range(ranks)]
        environs = [
            rank_environ(
                *(rank, ranks, store.port),
                {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": str(paths[rank]), **env},
            )
            for rank in range(ranks)
        ]
        ended = _run_together([script, *args], environs, limit_sec)
        failures = [path.read_text() for path in paths if path.exists()]
    if failures:  # torchrun takes the first failure; within one second, that of the lowest rank
        first = min(failures, key=lambda failure: int(json.loads(failure)["message"]["extraInfo"]["timestamp"]))
        ended = dataclasses.replace(ended, first=json.loads(first)["message"]["message"])
    return ended


def alone(script: str, *args: str, **env: str) -> Ended:
    """Run ``python SCRIPT ARGS...`` as a process that is no rank."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return _run_together([script, *args], [{**inherited, **env}])


def _run_together(arguments: list[str], environs: list[dict[str, str]], limit_sec: float = LIMIT_SEC) -> Ended:
    with contextlib.ExitStack() as stack:
        programs = [stack.enter_context(Program(arguments, environ)) for environ in environs]
        _watch(programs, limit_sec)
        statuses = [program.wait() for program in programs]
        return Ended(
            statuses,
            "".join(program.output() for program in programs),
            "".join(program.errors() for program in programs),
        )


def _watch(programs: Sequence[Program], limit_sec: float) -> None:
    """Wait until all have ended. As torchrun does, end the others when one has failed."""
    deadline, failed_at = time.monotonic() + limit_sec, 0.0
    while None in (statuses := [program.poll() for program in programs]):
        now = time.monotonic()
        assert now < deadline, f"a rank still runs: {statuses}"
        if any(statuses):
            failed_at = failed_at or now
            if now > failed_at + _TERM_AFTER_SEC:
                for program in programs:
                    program.terminate()
        time.sleep(0.02)


# -- in the fork ------------------------------------------------------------------------------------------------------


def become(arguments: Sequence[str], paths: Sequence[str], executable: str) -> None:
    """Run what ``EXECUTABLE ARGUMENTS`` runs, and end as it ends."""
    sys.executable = executable
    multiprocessing.spawn.set_executable(executable)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ddpstats", "tests")]:
        del sys.modules[name]  # the program imports what it uses
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # a program is no worker of another
    if os.environ.get("PYTHONUNBUFFERED") or arguments[0] == "-u":
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    status = 0
    try:
        _run_as_main([word for word in arguments[:1] if word != "-u"] + list(arguments[1:]), paths)
    except SystemExit as error:
        status = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        traceback = _of_the_program(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
        sys.excepthook(type(error), error, traceback)
        status = 1
    sys.exit(status)


def _run_as_main(arguments: Sequence[str], paths: Sequence[str]) -> None:
    main = vars(sys.modules["__main__"])
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    sys.path[:] = paths
    first, *rest = arguments
    if first.startswith("-m"):
        rest[:0] = [first[2:]] if first[2:] else []
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(rest[0], main)
    else:
        sys.argv[:] = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        main["__file__"] = os.path.abspath(first)
        exec(compile(Path(first).read_bytes(), os.path.abspath(first), "exec"), main)


def _of_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of this file."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def environ_of(**more: Any) -> dict[str, str]:
    """Return this process's environment without what would make a program a rank, and with ``more``."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ranks} | more
