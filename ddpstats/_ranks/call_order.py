"""The order in which the calls of one group run: one at a time, in call order, whichever thread they come from.

A call with nothing pending runs on the caller's own thread; `CallOrder.submit` hands a call to the one worker, and
calls that follow queue behind it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from ddpstats._base.lazy import refuse_without_values
from ddpstats._ranks.agreement import Agreement
from ddpstats.errors import ConfigError

T = TypeVar("T")
Work = Callable[[Agreement], T]


class CallOrder:
    """Who may call next. What a call does is for a subclass to say (`_perform`)."""

    def __init__(self, group_name: str) -> None:
        self.group_name = group_name
        self._turn = threading.RLock()  # re-entrant: a finalizer may run, and `release`, while this thread holds it
        self._state = threading.Condition(self._turn)
        self._busy, self._performer = False, 0  # and in which thread
        self._queue: deque[_Job[Any]] = deque()
        self._worker: threading.Thread | None = None
        self._users = 0

    def _perform(self, work: Work[T], timeout_sec: float) -> T:
        raise NotImplementedError

    def run(self, work: Work[T], timeout_sec: float) -> T:
        """Run ``work`` in turn; on this thread if nothing is pending."""
        self.refuse_inside()
        self._refuse_here()
        idle = False
        try:
            with self._turn:
                if not self._busy and not self._queue:
                    self._busy = idle = True
                    self._performer = threading.get_ident()
            if idle:
                return self._perform(work, timeout_sec)
        finally:
            if idle:
                with self._turn:
                    self._busy, self._performer = False, 0
                    if self._worker is not None:
                        self._state.notify_all()
        return self.submit(work, timeout_sec).result()

    def refuse_inside(self) -> None:
        """Raises where this thread is in the middle of a reduction on this group: what it waits for cannot come."""
        if self._performer == threading.get_ident():
            raise Reentered(
                f"a reduction on {self.group_name} was asked for in the middle of another one, on the same thread: by "
                "the handler of a signal, or by what runs when an object is collected. It cannot wait for the one that "
                "it interrupts. Set a flag there, and reduce at the next step of the program."
            )

    def _refuse_here(self) -> None:
        """Raises where nothing can be reduced: while torch traces the program. A subclass may know more."""
        refuse_without_values(f"a reduction on {self.group_name}")

    def submit(self, work: Work[T], timeout_sec: float) -> Future[T]:
        """Run ``work`` in turn on the worker thread; at once returns a future."""
        self._refuse_here()
        job = _Job(work, timeout_sec)
        with self._state:
            self._queue.append(job)
            if self._worker is None:
                self._worker = threading.Thread(target=self._serve, name="ddpstats", daemon=True)
                self._worker.start()
            self._state.notify_all()
        return job.future

    def _serve(self) -> None:
        while True:
            with self._state:
                # A thread that waits for work waits for the program, not for a peer: the one wait without a limit.
                self._state.wait_for(lambda: not self._busy if self._queue else self._users == 0)
                if not self._queue:  # and nobody who may submit is left
                    self._worker = None
                    return
                job = self._queue.popleft()
                self._busy, self._performer = True, threading.get_ident()
            job.run(self._perform)
            del job
            with self._state:
                self._busy, self._performer = False, 0
                self._state.notify_all()

    # -- users --------------------------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Another user that may `submit`."""
        with self._state:
            self._users += 1

    def release(self, *, wait: bool) -> None:
        """With the last user that may `submit` the worker ends, once it has done what is pending; ``wait`` for that."""
        with self._state:
            self._users -= 1
            worker = self._worker if self._users == 0 else None
            self._state.notify_all()
        if wait and worker is not None and worker is not threading.current_thread():
            worker.join()

    def end_worker(self, timeout_sec: float) -> bool:
        """Let the worker end after what is pending, whoever may still want to `submit`; whether it did in time."""
        with self._state:
            self._users = 0
            worker = self._worker
            self._state.notify_all()
        if worker is not None:
            worker.join(timeout_sec)
        return not self.worker_is_alive()

    def worker_is_alive(self) -> bool:
        worker = self._worker
        return worker is not None and worker.is_alive()


class Reentered(ConfigError):
    """Of this rank alone, and raised before anything is sent."""


class _Job(Generic[T]):
    def __init__(self, work: Work[T], timeout_sec: float) -> None:
        self.future: Future[T] = Future()
        self._work, self._timeout_sec = work, timeout_sec

    def run(self, perform: Callable[[Work[T], float], T]) -> None:
        try:
            self.future.set_result(perform(self._work, self._timeout_sec))
        except BaseException as error:
            self.future.set_exception(error)
