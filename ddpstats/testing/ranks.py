"""Run a function on real torch.distributed ranks: processes on this machine, joined by gloo over loopback.

`run_ranks` starts the ranks, calls the function once on each, and ends them. `RankPool` keeps them for many calls.

1. The parent serves the rendezvous store on a port that the system picks; the ranks are its clients.
2. Each rank is forked from a process that has imported torch (`forkserver`) and ends with the parent. It runs in a
   separate session, with the parent's `sys.path`.
3. The function and its arguments go to each rank by pickle, the answers come back the same way, over a socket pair that
   only the two hold: nothing from outside ever reaches pickle.
4. When the time limit passes, the ranks that still run give their stacks and are killed with all their children.
5. Whatever ends the parent ends the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats.testing import rank as rank_main
from ddpstats.testing.forkserver import Fork
from ddpstats.testing.outcomes import RankDied, RankError, RankOutcome, RankOutcomes, RankTimedOut
from ddpstats.testing.rank import END, RankAnswer

_TAIL_BYTES = 8000
_STACK_BYTES = 50_000
_STACK_WAIT_SEC = 2.0
_TICK_SEC = 0.05
_EXIT_GRACE_SEC = 5.0
_STALL_SEC = 10
_REAP_SEC = 30.0  # a process that the kernel holds, in a driver for example, dies later or never


class RankProcess:
    """A running rank, the connection to it, and what it writes to stderr. Every way out goes through `_end`."""

    def __init__(self, rank: int, world_size: int, store_port: int, env: Mapping[str, str]) -> None:
        self.rank = rank
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `release`
        self._stderr_start = 0
        self._control, theirs = multiprocessing.Pipe()
        _limit_stall(self._control, socket.SO_RCVTIMEO, _STALL_SEC)
        environ = rank_environ(rank, world_size, store_port, env)
        with theirs:
            self.process = Fork(
                *(rank_main.main, rank, world_size, store_port, theirs), environ=environ, stderr=self._stderr.fileno()
            )
            self.process.start()

    def send(self, payload: bytes, limit_sec: float) -> None:
        """Send one frame. A rank that is gone or does not read is no error here: its answer does not come.

        ``limit_sec``: how long it may take to read on, positive. A large frame waits until a new rank has joined.
        """
        _limit_stall(self._control, socket.SO_SNDTIMEO, limit_sec)
        self._stderr_start = os.fstat(self._stderr.fileno()).st_size
        with contextlib.suppress(OSError):
            self._control.send_bytes(payload)

    def receive(self, deadline: float) -> RankAnswer | None:
        """Return the answer, or None if the rank ends without one, or has none by ``deadline`` (monotonic seconds)."""
        connection.wait([self._control, self.process.sentinel], max(deadline - time.monotonic(), 0))
        with contextlib.suppress(EOFError, OSError):
            if self._control.poll():
                answer: RankAnswer = self._control.recv()
                return answer
        if time.monotonic() < deadline:
            self.process.join(_EXIT_GRACE_SEC)  # its socket may be closed before its exit code is known
        return None

    def explain_silence(self, timeout_sec: float) -> RankError:
        """Return why there is no answer: the process has ended, or still runs."""
        exit_code = self.process.exitcode
        if exit_code is None:
            return RankTimedOut(self.rank, timeout_sec, self._stack())
        start = max(self._stderr_start, os.fstat(self._stderr.fileno()).st_size - _TAIL_BYTES)
        return RankDied(self.rank, exit_code, self._stderr_from(start).strip())

    def _stack(self) -> str:
        """Have faulthandler write the stack of every thread; "" if it does not."""
        start, text = os.fstat(self._stderr.fileno()).st_size, ""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_WAIT_SEC
        while time.monotonic() < deadline:
            time.sleep(_TICK_SEC)
            before, text = text, self._stderr_from(start)
            if text and text == before:
                break
        return text

    def _stderr_from(self, start: int) -> str:
        return os.pread(self._stderr.fileno(), _STACK_BYTES, start).decode("utf-8", "replace")

    def release(self) -> None:
        """Wait for a killed rank, half a minute at most, and close what belongs to it."""
        self.process.join(_REAP_SEC)
        self._control.close()
        self._stderr.close()


def rank_environ(rank: int, world_size: int, store_port: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment, with what torchrun would set for the rank, and with ``env`` on top of both."""
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
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **env,
    }


def _limit_stall(control: connection.Connection, option: int, limit_sec: float) -> None:
    """Make a message that stalls midway raise an error, so that the time limit holds although the rank hangs."""
    with socket.socket(fileno=os.dup(control.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit_sec) + 1, 0))


def serve_store() -> TCPStore:
    """Return a store's server in this process, on a free port of the loopback interface only."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    # Left to itself TCPStore would listen on every interface. It owns the descriptor from here on, which torch 2.6 has
    # only without libuv.
    host, port = listener.getsockname()
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=False)


def _end(processes: list[RankProcess]) -> None:
    """Kill the ranks, with all that they started, and leave none in the list."""
    for process in processes:
        process.process.kill()
    while processes:
        processes.pop().release()


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
        timeout_sec: seconds from the moment that all ranks are forked.
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
    with RankPool(world_size, timeout_sec=timeout_sec, env=env) as pool:
        outcomes, _ = pool._call(fn, args, kwargs, timeout_sec)
        exit_codes = pool._stop() or [outcome.exit_code for outcome in outcomes]
    return RankOutcomes(map(_with_exit, outcomes, exit_codes))


class RankPool:
    """Ranks that stay for many calls: a call of an empty function costs well below 5 ms. Not thread-safe.

    The processes start with the first `run`. What `fn` leaves behind in them (modules, patches, threads, groups) is
    there in the next run; the environment variables are as they were before. After a run in which a rank failed, or the
    ranks did not issue the same number of collectives or make the same groups, or the default group was destroyed, the
    next `run` starts fresh ranks. Not noticed: a subgroup out of step, a changed directory; call `restart` after those.

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
        self._timeout_sec = timeout_sec
        self._env = dict(env or {})
        self._store: TCPStore | None = None
        self._processes: list[RankProcess] = []
        # For a pool that is dropped without `close`, and for the interpreter's end.
        self._finalizer = Finalize(self, _end, (self._processes,), exitpriority=0)
        self._closed = False

    def run(self, fn: Callable[..., Any], *args: Any, timeout_sec: float | None = None, **kwargs: Any) -> RankOutcomes:
        """Call `fn(*args, **kwargs)` on every rank; blocks until all have answered. As `run_ranks`, but the ranks stay.

        Raises:
            RuntimeError: the pool is closed. Otherwise as `run_ranks`.
        """
        if self._closed:
            raise RuntimeError("this RankPool is closed")
        outcomes, in_step = self._call(fn, args, kwargs, self._timeout_sec if timeout_sec is None else timeout_sec)
        if outcomes.errors() or not in_step:
            self._stop(grace_sec=0)
        return outcomes

    def restart(self) -> None:
        """End the ranks; the next `run` starts fresh ones. Blocks until they are gone."""
        self._stop()

    def close(self) -> None:
        """End the ranks for good and leave nothing behind. Blocks until they are gone. May be called twice."""
        self._closed = True
        self._stop()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_sec: float
    ) -> tuple[RankOutcomes, bool]:
        """Return the outcomes, and whether the ranks are in step. Ranks of which one does not answer are killed."""
        if not timeout_sec > 0:
            raise ValueError(f"timeout_sec must be positive, not {timeout_sec}")
        payloads = _payloads(fn, args, kwargs, self.world_size)
        try:
            if not self._processes:
                self._store = serve_store()
                for rank in range(self.world_size):
                    self._processes.append(RankProcess(rank, self.world_size, self._store.port, self._env))
            deadline = time.monotonic() + timeout_sec
            for process, payload in zip(self._processes, payloads, strict=True):
                process.send(payload, max(deadline - time.monotonic(), 0))
            answers = [process.receive(deadline) for process in self._processes]
            outcomes = [
                RankOutcome(process.rank, error=process.explain_silence(timeout_sec))
                if answer is None
                else pickle.loads(answer.outcome)
                for process, answer in zip(self._processes, answers, strict=True)
            ]
        except BaseException:
            self._stop(grace_sec=0)
            raise
        if None in answers:
            return RankOutcomes(map(_with_exit, outcomes, self._stop(grace_sec=0))), False
        groups = {answer.group for answer in answers if answer}
        return RankOutcomes(outcomes), None not in groups and len(groups) == 1

    def _stop(self, grace_sec: float = _EXIT_GRACE_SEC) -> list[int | None]:
        """Let the ranks end by themselves, kill those that do not in time. Return the exit codes."""
        processes = list(self._processes)
        try:
            for process in processes:
                process.send(END, _STALL_SEC)
            deadline = time.monotonic() + grace_sec
            for process in processes:
                process.process.join(max(deadline - time.monotonic(), 0))
        finally:
            _end(self._processes)
            self._store = None
        return [process.process.exitcode for process in processes]


def _payloads(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], world_size: int) -> list[bytes]:
    """Return what each rank is sent."""
    if getattr(fn, "__module__", None) == "__main__":
        raise ValueError(
            f"{fn.__qualname__} is defined in __main__, which the ranks do not run: move it to a module to import"
        )
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, PerRank) and len(argument.values) != world_size:
            raise ValueError(f"PerRank holds {len(argument.values)} values, but there are {world_size} ranks")

    def of(rank: int, argument: Any) -> Any:
        return argument.values[rank] if isinstance(argument, PerRank) else argument

    return [
        pickle.dumps((fn, [of(rank, value) for value in args], {key: of(rank, kwargs[key]) for key in kwargs}))
        for rank in range(world_size)
    ]


def _with_exit(outcome: RankOutcome, exit_code: int | None) -> RankOutcome:
    return dataclasses.replace(outcome, exit_code=exit_code)
