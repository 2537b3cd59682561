"""All ranks of one generation: processes started together, which live and die together."""

from __future__ import annotations

import functools
import os
import pickle
import select
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats.testing._forkserver import START_TIMEOUT_SEC
from ddpstats.testing._rank_outcomes import RankDied, RankNotRun, RankOutcome, RankOutcomes, RankTimedOut
from ddpstats.testing._rank_process import RankProcess
from ddpstats.testing._rank_wire import GroupState, Reply, outcome_of

_STOP_GRACE_SEC = 5.0
_STACK_WAIT_SEC = 2.0
_TICK_SEC = 0.05  # a rank's death is seen at once by its socket, or after this long if a child of it holds the socket


class RankTeam:
    """`world_size` processes and the store they meet in. Blocks until all are ready or one failed to start."""

    def __init__(self, world_size: int, env: Mapping[str, str]) -> None:
        self._store: TCPStore | None = serve_store()
        self._processes: list[RankProcess] = []
        # For a team that is dropped without `stop` or `kill`, and for the interpreter's end.
        self._finalizer = weakref.finalize(self, _kill_all, self._processes, os.getpid())
        self.alive = self.in_step = True
        try:
            for rank in range(world_size):
                self._processes.append(RankProcess(rank, world_size, self._store.port, env))
            self._collect(time.monotonic() + START_TIMEOUT_SEC)
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
            process.send(payload, deadline)
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
        """Read until every rank has answered or ended, or until `deadline`.

        All sockets are read in turn: a rank with a large answer must not wait for another's to be read.
        """
        pending = self._processes
        while pending:
            left = deadline - time.monotonic()
            _wait_for_any(pending, min(max(left, 0), _TICK_SEC))
            for process in pending:
                process.pump()
            if left <= 0:
                return
            pending = [process for process in pending if process.frame is None and not process.ended]

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
            error: Exception = RankTimedOut(process.rank, START_TIMEOUT_SEC, "(it was still starting)")
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


def _wait_for_any(processes: Sequence[RankProcess], timeout_sec: float) -> None:
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    poll.poll(timeout_sec * 1000)


def _with_exit(outcome: RankOutcome, exit_code: int | None) -> RankOutcome:
    return RankOutcome(outcome.rank, outcome.value, outcome.error, outcome.traceback, exit_code)


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


def _kill_all(processes: Sequence[RankProcess], owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a forked copy of the parent runs this at its exit; the ranks are not its own
        return
    for process in processes:
        process.kill()
    for process in processes:
        process.reap()
        process.release()
