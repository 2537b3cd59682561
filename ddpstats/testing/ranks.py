"""Run a function on real torch.distributed ranks: processes on this machine, joined by gloo over loopback.

`run_ranks` starts the ranks, calls the function once on each, and ends them. `RankPool` keeps them for many calls.

1. The parent serves the rendezvous store on a port that the system picks; the ranks are its clients.
2. Each rank is forked from a process that has imported torch (`forkserver`) and ends with the parent. It runs in a
   session of its own, with the parent's `sys.path`, and says when it is ready.
3. The function and its arguments go to each rank by pickle, the answers come back the same way, over a socket pair that
   only the two hold: nothing from outside ever reaches pickle.
4. When the time limit passes, the ranks that still run give their stacks and are killed with all their children.
5. Whatever ends the parent ends the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from types import TracebackType
from typing import IO, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats.testing import rank as rank_main
from ddpstats.testing.forkserver import fork
from ddpstats.testing.outcomes import RankDied, RankNotRun, RankOutcome, RankOutcomes, RankTimedOut
from ddpstats.testing.rank import END, GroupState, Reply, outcome_of

_TAIL_BYTES = 8000
_STACK_BYTES = 50_000
_EXIT_GRACE_SEC = 5.0
_STALL_SEC = 10
_REAP_SEC = 30.0  # a process that the kernel holds, in a driver for example, dies later or never


class RankProcess:
    """A running rank. Not thread-safe. Every way out goes through `kill` (or `stop`) and then `release`.

    ``frame`` is its answer to the last `send`; ``ended`` says that it is gone without one.
    """

    def __init__(self, rank: int, world_size: int, store_port: int, env: Mapping[str, str]) -> None:
        self.rank = rank
        self.frame: bytes | None = None
        self.ended = False
        self._stderr_start = 0
        with contextlib.ExitStack() as resources:
            self._control, theirs = multiprocessing.Pipe()
            resources.enter_context(self._control)
            _limit_stalls(self._control)
            self._stderr = resources.enter_context(tempfile.TemporaryFile())
            self._stack = resources.enter_context(tempfile.TemporaryFile())
            with theirs:
                self._process = fork(
                    rank_main.main,
                    *(rank, world_size, store_port),
                    environ=rank_environ(rank, world_size, store_port, env),
                    stdout=1,
                    stderr=self._stderr.fileno(),
                    control_fd=theirs.fileno(),
                    stack_fd=self._stack.fileno(),
                )
            assert self._process.pid is not None
            self.pid = self._process.pid
            self._resources = resources.pop_all()

    @property
    def exit_code(self) -> int | None:
        """The exit code once the process has ended; negative for a signal."""
        return self._process.exitcode

    @property
    def signs(self) -> list[Any]:
        """Return what `multiprocessing.connection.wait` sees ready when an answer came or the process ended."""
        return [self._control, self._process.sentinel]

    def send(self, payload: bytes) -> None:
        """Send one frame. A rank that is gone or does not read is no error here: its answer does not come."""
        self.frame = None
        with contextlib.suppress(OSError):
            self._control.send_bytes(payload)

    def read(self) -> None:
        """Take the answer if there is one. Sets `frame`, or `ended` if the rank is gone without one."""
        gone = self._has_exited()  # asked first, so that what it sent before it went is still read below
        try:
            if self._control.poll():
                self.frame = self._control.recv_bytes()
                self._stderr_start = _size_bytes(self._stderr)
            else:
                self.ended = gone
        except (EOFError, OSError):
            self.ended = True

    def ask_for_stack(self) -> None:
        """Have faulthandler write every thread's stack. Only for a rank that has said "ready"."""
        if not self._has_exited():
            os.kill(self.pid, signal.SIGUSR1)

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
        self.send(END)

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
        """Return whether the process has ended; its own children, which may hold its socket, are then killed."""
        if self._process.exitcode is None:
            return False
        self._kill_group()
        return True

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


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


def _limit_stalls(control: Connection) -> None:
    """Have a message that stops in its middle be an error: the rank hangs, and its time limit is to hold."""
    with socket.socket(fileno=os.dup(control.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _STALL_SEC, 0))


def _size_bytes(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


_START_TIMEOUT_SEC = 120.0  # a loaded machine takes long
_STOP_GRACE_SEC = 5.0
_STACK_WAIT_SEC = 2.0
_TICK_SEC = 0.05


class RankTeam:
    """`world_size` processes and the store they meet in. Blocks until all are ready or one failed to start."""

    def __init__(self, world_size: int, env: Mapping[str, str]) -> None:
        self._store: TCPStore | None = serve_store()
        self._processes: list[RankProcess] = []
        # For a team that is dropped without `stop` or `kill`, and for the interpreter's end.
        self._finalizer = Finalize(self, _kill_all, (self._processes,), exitpriority=0)
        self.alive = self.in_step = True
        try:
            for rank in range(world_size):
                self._processes.append(RankProcess(rank, world_size, self._store.port, env))
            self._collect(time.monotonic() + _START_TIMEOUT_SEC)
        except BaseException:
            self.kill()
            raise

    def failed_start(self) -> RankOutcomes | None:
        """None if every rank is ready; otherwise an outcome for each, and the team is dead."""
        failed = tuple(process.rank for process in self._processes if process.frame is None)
        if not failed:
            return None
        gone = [process.rank for process in self._processes if process.ended]
        blamed = tuple(gone) or failed
        self._end_processes()
        outcomes = [self._start_failure(process, blamed) for process in self._processes]
        self.kill()
        return RankOutcomes(outcomes)

    def run(self, payloads: Sequence[bytes], timeout_sec: float) -> RankOutcomes:
        """Send each rank its payload and wait for all answers, `timeout_sec` at most.

        If a rank died or timed out, the team is dead afterwards (`alive`). If the default process group is gone or
        out of step between the ranks, `in_step` is false.
        """
        try:
            return self._run(payloads, timeout_sec)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> list[int | None]:
        """Let every rank end by itself, kill those that do not, and leave nothing behind. Returns the exit codes."""
        try:
            if self.alive:
                deadline = time.monotonic() + _STOP_GRACE_SEC
                for process in self._processes:
                    process.ask_to_end()
                for process in self._processes:
                    process.wait(deadline)
        finally:
            self.kill()
        return [process.exit_code for process in self._processes]

    def kill(self) -> None:
        """Kill and reap every rank, close everything. May be called twice."""
        self.alive = False
        self._finalizer()
        self._store = None

    def _run(self, payloads: Sequence[bytes], timeout_sec: float) -> RankOutcomes:
        deadline = time.monotonic() + timeout_sec
        for process, payload in zip(self._processes, payloads, strict=True):
            process.send(payload)
        self._collect(deadline)
        if all(process.frame is not None for process in self._processes):
            return self._answers()
        late = [process for process in self._processes if process.frame is None and not process.ended]
        _fetch_stacks(late)
        self._end_processes()
        outcomes = RankOutcomes(self._outcome(process, timeout_sec) for process in self._processes)
        self.kill()
        return outcomes

    def _answers(self) -> RankOutcomes:
        replies = [_open(process) for process in self._processes]
        self.in_step = _in_step([reply.group_state for reply in replies])
        return RankOutcomes(outcome_of(rank, reply) for rank, reply in enumerate(replies))

    def _collect(self, deadline: float) -> None:
        """Read until every rank has answered or ended, or until `deadline`."""
        while pending := [process for process in self._processes if process.frame is None and not process.ended]:
            left = deadline - time.monotonic()
            connection.wait([sign for process in pending for sign in process.signs], max(left, 0))
            for process in pending:
                process.read()
            if left <= 0:
                return

    def _end_processes(self) -> None:
        for process in self._processes:
            if process.ended:
                process.wait_for_death()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.reap()

    def _outcome(self, process: RankProcess, timeout_sec: float) -> RankOutcome:
        if process.frame is not None:
            return _with_exit(outcome_of(process.rank, _open(process)), process.exit_code)
        if process.ended:
            return self._death(process)
        error = RankTimedOut(process.rank, timeout_sec, process.stack())
        return RankOutcome(process.rank, None, error, "", process.exit_code)

    def _start_failure(self, process: RankProcess, blamed: tuple[int, ...]) -> RankOutcome:
        if process.ended:
            return self._death(process)
        if process.rank in blamed:
            error: Exception = RankTimedOut(process.rank, _START_TIMEOUT_SEC, "(it was still starting)")
        else:
            error = RankNotRun(process.rank, blamed)
        return RankOutcome(process.rank, None, error, "", process.exit_code)

    def _death(self, process: RankProcess) -> RankOutcome:
        error = RankDied(process.rank, process.exit_code, process.stderr_tail())
        return RankOutcome(process.rank, None, error, "", process.exit_code)


_libuv_takes_listeners = True


def serve_store() -> TCPStore:
    """A store's server in this process, on a free port of the loopback interface only. Each team has its own."""
    global _libuv_takes_listeners
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    # Left to itself TCPStore would listen on every interface. It owns the descriptor from here on.
    address, port = listener.getsockname()
    made: Callable[..., TCPStore] = TCPStore
    serve = functools.partial(
        made, address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    if _libuv_takes_listeners:
        try:
            return serve()
        except NotImplementedError:  # torch 2.6; said once, for c10d writes to the standard error as well
            _libuv_takes_listeners = False
    return serve(use_libuv=False)


def _in_step(states: Sequence[GroupState | None]) -> bool:
    return states[0] is not None and states[0].world_size == len(states) and len(set(states)) == 1


def _open(process: RankProcess) -> Reply:
    assert process.frame is not None
    reply: Reply = pickle.loads(process.frame)
    return reply


def _with_exit(outcome: RankOutcome, exit_code: int | None) -> RankOutcome:
    return dataclasses.replace(outcome, exit_code=exit_code)


def _fetch_stacks(processes: Sequence[RankProcess]) -> None:
    """Ask each rank for its stack and wait until the files no longer grow."""
    for process in processes:
        process.ask_for_stack()
    deadline, before = time.monotonic() + _STACK_WAIT_SEC, [-1]
    while time.monotonic() < deadline:
        now = [process.stack_bytes() for process in processes]
        if all(now) and now == before:
            return
        before = now
        time.sleep(_TICK_SEC)


def _kill_all(processes: Sequence[RankProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.reap()
        process.release()


_PROBE_TIMEOUT_SEC = 5.0


@dataclasses.dataclass(frozen=True)
class PerRank:
    """An argument that differs by rank: `run_ranks(fn, 2, PerRank([a, b]))` calls `fn(a)` on rank 0, `fn(b)` on rank 1.

    Only as an argument itself, not inside another one. Each rank is sent its own value alone.
    """

    values: Sequence[Any]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_sec: float = 60.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> RankOutcomes:
    """Call `fn(*args, **kwargs)` on `world_size` fresh ranks. Blocks until all have ended, and leaves none of them.

    The default process group (gloo, on the CPU) is there when `fn` is called; `fn` finds its rank in it. OpenMP and
    torch use one thread per rank. A rank's stdout is the parent's; its stderr is kept, and shown if it dies.

    Args:
        fn: a function at the top level of an importable module, not of `__main__`.
        world_size: number of ranks.
        args, kwargs: anything that pickles; a `PerRank` gives each rank its own value.
        timeout_sec: seconds from the moment all ranks are ready: from its fork on a rank has 120 seconds to start.
        env: environment variables for the ranks, on top of the parent's and of torchrun's.

    Returns:
        One outcome per rank, in rank order, with the process's real exit code. A rank's failure is an outcome, and
        only `.values()` raises for it.

    Raises:
        ValueError: `fn` belongs to `__main__`, or a `PerRank` has not `world_size` values, or a number is not positive.
        pickle.PicklingError, AttributeError, TypeError: `fn` or an argument cannot be pickled.

    Example:
        >>> run_ranks(my_module.sum_of_ranks, 2).values()  # rank 0 and rank 1 both return 0 + 1
        [1, 1]
    """
    pool = RankPool(world_size, timeout_sec=timeout_sec, env=env)
    try:
        outcomes = pool._call(fn, args, kwargs, timeout_sec)
        exit_codes = pool._stop()
    except BaseException:
        pool._kill()
        raise
    return RankOutcomes(map(_with_exit, outcomes, exit_codes or [outcome.exit_code for outcome in outcomes]))


class RankPool:
    """Ranks that stay for many calls: a call of an empty function costs well below 5 ms. Not thread-safe.

    The processes start with the first `run`. What `fn` leaves behind in them (modules, patches, threads, groups) is
    there in the next run; the environment variables are as they were before. After a run in which a rank died or timed
    out, the pool is killed and the next `run` starts a fresh one. After a run in which a rank raised, or the ranks did
    not issue the same number of collectives, or the default group was destroyed, the next `run` begins with a small
    all_reduce, which decides whether the pool still works, and starts fresh ranks if not. Not noticed: a subgroup out
    of step, a changed directory; call `restart` after those.

    Args:
        world_size: number of ranks.
        timeout_sec: the limit of each `run` that gives none, in seconds, not counting the start.
        env: environment variables for the ranks.

    Example:
        >>> with RankPool(2) as pool:
        ...     for tree in trees:
        ...         pool.run(my_module.reduce_it, PerRank([tree, None])).values()
    """

    def __init__(self, world_size: int, *, timeout_sec: float = 60.0, env: Mapping[str, str] | None = None) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        self.world_size = world_size
        self._timeout_sec = _positive(timeout_sec)
        self._env = dict(env or {})
        self._team: RankTeam | None = None
        self._is_suspect = False
        self._closed = False

    def run(self, fn: Callable[..., Any], *args: Any, timeout_sec: float | None = None, **kwargs: Any) -> RankOutcomes:
        """Call `fn(*args, **kwargs)` on every rank; blocks until all have answered. As `run_ranks`, but the ranks stay.

        Raises:
            RuntimeError: the pool is closed. Otherwise as `run_ranks`.
        """
        if self._closed:
            raise RuntimeError("this RankPool is closed")
        limit_sec = self._timeout_sec if timeout_sec is None else _positive(timeout_sec)
        self._drop_unusable()
        outcomes = self._call(fn, args, kwargs, limit_sec)
        # Send and receive count as collectives on those ranks alone, so unequal counts are a suspicion and no proof.
        self._is_suspect = self._team is not None and not (self._team.in_step and not outcomes.errors())
        return outcomes

    def restart(self) -> None:
        """End the ranks; the next `run` starts fresh ones. Blocks until they are gone."""
        if self._is_suspect:  # a rank that another has left alone in a collective does not end by itself
            self._kill()
        else:
            self._stop()

    def close(self) -> None:
        """End the ranks for good and leave nothing behind. Blocks until they are gone. May be called twice."""
        self._closed = True
        self.restart()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], limit_sec: float
    ) -> RankOutcomes:
        if rank_main.is_opening:  # else each of its ranks would start ranks, which start ranks
            raise RuntimeError(
                "ranks are started when a module is imported, and a rank imports it to find its function: "
                "start them in a function, or under `if __name__ == '__main__':`"
            )
        payloads = _payloads(fn, args, kwargs, self.world_size)
        team = self._living_team()
        failed = team.failed_start()
        return team.run(payloads, limit_sec) if failed is None else failed

    def _drop_unusable(self) -> None:
        """Asked before the ranks are used again, and not before: who restarts them need not wait for the answer."""
        team = self._team
        if self._is_suspect and team is not None and team.alive and not _works(team, self.world_size):
            self._kill()

    def _living_team(self) -> RankTeam:
        if self._team is None or not self._team.alive:
            self._team = RankTeam(self.world_size, self._env)
        return self._team

    def _stop(self) -> list[int | None]:
        team, self._team = self._team, None
        self._is_suspect = False
        return team.stop() if team is not None else []

    def _kill(self) -> None:
        team, self._team = self._team, None
        self._is_suspect = False
        if team is not None:
            team.kill()


def _payloads(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], world_size: int) -> list[bytes]:
    """Return what each rank is sent; the same bytes for all unless an argument is a `PerRank`."""
    _check_importable(fn)
    varying = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, PerRank)]
    for argument in varying:
        if len(argument.values) != world_size:
            raise ValueError(f"PerRank holds {len(argument.values)} values, but there are {world_size} ranks")
    if not varying:
        return [pickle.dumps((fn, args, kwargs))] * world_size
    return [pickle.dumps((fn, *_arguments_of(rank, args, kwargs))) for rank in range(world_size)]


def _arguments_of(rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(_pick(value, rank) for value in args), {name: _pick(value, rank) for name, value in kwargs.items()}


def _pick(argument: Any, rank: int) -> Any:
    return argument.values[rank] if isinstance(argument, PerRank) else argument


def _check_importable(fn: Callable[..., Any]) -> None:
    while isinstance(fn, functools.partial):
        fn = fn.func
    if getattr(fn, "__module__", None) == "__main__":
        name = getattr(fn, "__qualname__", repr(fn))
        raise ValueError(
            f"{name} is defined in __main__, which the ranks do not run: move it to a module that can be imported"
        )


def _positive(timeout_sec: float) -> float:
    if not timeout_sec > 0:
        raise ValueError(f"timeout_sec must be positive, not {timeout_sec}")
    return timeout_sec


def _works(team: RankTeam, world_size: int) -> bool:
    """Return whether the team's default process group still adds up."""
    payload = pickle.dumps((rank_main.probe_group, (_PROBE_TIMEOUT_SEC,), {}))
    answers = team.run([payload] * world_size, _PROBE_TIMEOUT_SEC + 1.0)
    return [answer.value for answer in answers] == [float(world_size)] * world_size
