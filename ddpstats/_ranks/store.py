"""A store whose every request ends within a limit.

A request to a `TCPStore` waits in C++ for as long as its connection is open: a server that is stopped, or cut off from
the network, keeps its clients for ever (torch 2.13, measured: `check`, `set`, `clone`; the store's own timeout counts
for keys that are missing, and for a connection that is refused again and again). Hence:

1. Requests run one after another on a thread of the connection's, which ends a moment after the last.
2. The caller waits until its deadline. A request that has not begun by then is cancelled; one that has begun goes on
   until the answer comes or the connection ends, and requests that follow on that connection wait for it.
3. The connection is made at the first request.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

# Errors of a request: the store is gone or silent, or holds bytes that ddpstats did not write.
STORE_ERRORS = (RuntimeError, OSError, ValueError)

GLANCE_SEC = 0.5  # limit of a request that is repeated where the store is silent
LIMIT_SEC = 10.0  # limit of a request whose caller names none
_LEAST_SEC = 0.05  # after a deadline that has passed: what has come may still be read
_WATCH_SEC = 1.0
_LEAVE_SEC = 5.0  # for all threads, when the process ends
_LINGER_SEC = 0.05  # of a thread without a request: to start a thread costs more than to ask the store
_POLL_SEC = 0.02  # torchrun ends all other ranks within 0.1 s of the first that ends

_ABSENT = "none"  # a value that no key has
_REQUESTS_PER_SEC = 5000  # of all ranks together: one thread of one process answers them all


def shared_poll(poll_sec: float, ranks: int) -> float:
    """Return how often one of so many ranks may ask the store, so that all of them together do not keep it busy."""
    return max(poll_sec, ranks / _REQUESTS_PER_SEC)


def growing_polls(longest_sec: float) -> Iterator[float]:
    """Yield short sleeps first, long ones later. The store's own wait would report each of its timeouts on stderr."""
    poll_sec = min(0.005, longest_sec)
    while True:
        yield poll_sec
        poll_sec = min(1.5 * poll_sec, longest_sec)


def wait_for(condition: Callable[[], bool], limit_sec: float, longest_poll_sec: float = _POLL_SEC) -> bool:
    """Wait until the condition is met, and return whether that came within the limit."""
    deadline, polls = time.monotonic() + limit_sec, growing_polls(longest_poll_sec)
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(next(polls))
    return True


class StoreSilent(OSError):
    """Raised when the store did not answer in time."""


class Worker:
    """Runs calls one after another on a daemon thread, which ends a moment after the last one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # re-entrant: the handler of a signal may submit, too
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self.unfinished = 0  # calls that have not ended
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run ``call`` after those that were submitted before."""
        future: Future[T] = Future()
        with self._lock:
            self.unfinished += 1
            self._calls.put((future, call))
            if sys.is_finalizing():  # other threads do not run any more
                self._run()
            elif not self.is_alive():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                _active.add(self)
                try:
                    self._thread.start()
                except RuntimeError:  # Python is ending, and starts no thread any more
                    self._run()
        return future

    def _run(self) -> None:
        while True:
            try:
                future, call = self._calls.get(timeout=0.0 if _is_ending else _LINGER_SEC)
            except queue.Empty:
                with self._lock:
                    if self._calls.empty():
                        self._thread = None
                        _active.discard(self)
                        return
                continue
            self._perform(future, call)
            del future, call

    def _perform(self, future: Future[T], call: Callable[[], T]) -> None:
        value, failure = None, None
        is_wanted = future.set_running_or_notify_cancel()
        try:
            value = call() if is_wanted else None
        except BaseException as error:
            failure = error
        with self._lock:
            self.unfinished -= 1
        if failure is not None:
            future.set_exception(failure)
        elif is_wanted:
            future.set_result(value)  # type: ignore[arg-type]

    def is_alive(self) -> bool:
        """Return whether the thread runs; in a forked process it does not."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def is_current(self) -> bool:
        """Return whether this is the worker's own thread."""
        return self._thread is threading.current_thread()

    def join(self, timeout_sec: float) -> bool:
        """Wait for the end of all calls and of the thread, if that comes in time. Returns whether it did."""
        with self._lock:  # not while the thread is about to start
            thread = self._thread
        if thread is not None and not self.is_current():
            thread.join(max(0.0, timeout_sec))
        return not self.is_alive()


_active: set[Worker] = set()  # those that have a thread; `list` copies it in one step, whatever threads do
_is_ending = False


def rest(patience_sec: float = 2 * _LINGER_SEC) -> None:
    """Wait a moment for the end of threads that have nothing to do. Never waits long for one that has."""
    deadline = time.monotonic() + patience_sec
    for worker in list(_active):
        worker.join(deadline - time.monotonic())


def _end_all() -> None:
    """End all threads: one that asks for the GIL while Python ends aborts the process. Runs after other modules'."""
    global _is_ending
    _is_ending = True
    rest(_LEAVE_SEC)


atexit.register(_end_all)
os.register_at_fork(after_in_child=_active.clear)  # their threads belong to the parent


class Connection:
    """One connection to a store, shared by all parts of that store."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        """``connect`` is called once, on a thread, at the first request."""
        self.limits = threading.local()
        self._connect: Callable[[], Any] | None = connect
        self._store: Any = None
        self._refusal: BaseException | None = None
        self._worker, self._process = Worker("ddpstats-store"), os.getpid()

    def _answer(self, question: Callable[[Any], T]) -> T:
        """Ask the store, which is connected first. Where there is no connection any more, it is not asked again."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        try:
            if self._connect is not None:
                connect, self._connect = self._connect, None  # and with it the store that it came from
                self._store = connect()
            return question(self._store)
        except BaseException as error:
            if self._store is None or type(error).__name__ == "DistNetworkError":  # each further one logs frames of C++
                self._refusal = error
            raise

    def ask(
        self,
        question: Callable[[Any], T],
        deadline: float,
        watch: Callable[[], None] | None = None,
        is_dropped: bool = True,
    ) -> T:
        """Return the answer. Raises what ``question`` and ``watch`` raise, and `StoreSilent`.

        ``is_dropped``: a question that has not begun by the deadline is asked no more.
        """
        if os.getpid() != self._process:  # two processes would take each other's answers
            raise OSError("this process was forked from the one whose connection to the store it is")
        future = self._worker.submit(lambda: self._answer(question))
        try:
            while True:
                left_sec = max(_LEAST_SEC, deadline - time.monotonic())
                try:
                    return future.result(left_sec if watch is None else min(_WATCH_SEC, left_sec))
                except FutureTimeout:
                    if future.done():
                        return future.result()  # the question itself timed out
                if watch is not None:
                    watch()
                if time.monotonic() >= deadline:
                    raise StoreSilent("no answer in time")
        finally:
            if is_dropped:
                future.cancel()

    def renew(self) -> None:
        """Leave the connection to a request that goes on, if there is one, and take another."""
        if self._worker.unfinished and self._store is not None:
            self._connect, self._store, self._worker = self._store.clone, None, Worker("ddpstats-store")


class BoundedStore:
    """A part of a store: torch's methods, each with a limit. Parts of one store share a connection.

    ``host_rank``: the global rank whose process serves the store; None where that is no rank, or not known.
    """

    def __init__(
        self, connect: Callable[[], Any], *, host_rank: int | None = None, limit_sec: float = LIMIT_SEC
    ) -> None:
        self.host_rank, self.limit_sec = host_rank, limit_sec
        self._connection, self._prefix = Connection(connect), ""

    def part(self, prefix: str, limit_sec: float | None = None) -> BoundedStore:
        """Return a part of this part, over the same connection."""
        part = BoundedStore.__new__(BoundedStore)
        part.host_rank, part._connection = self.host_rank, self._connection
        part.limit_sec = self.limit_sec if limit_sec is None else limit_sec
        part._prefix = f"{self._prefix}{prefix}/"
        return part

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Limit the requests that this thread makes inside, all together, to so many seconds."""
        limits, deadline = self._connection.limits, time.monotonic() + seconds
        outer = getattr(limits, "deadline", None)
        limits.deadline = deadline if outer is None else min(outer, deadline)
        try:
            yield
        finally:
            limits.deadline = outer

    def use(
        self,
        question: Callable[[Any, str], T],
        limit_sec: float | None = None,
        watch: Callable[[], None] | None = None,
    ) -> T:
        """Return ``question`` of (the store itself, the prefix of this part's keys), within the limit.

        ``watch`` is called about once a second meanwhile; it may raise, and must not ask this store.
        """
        prefix, deadline = self._prefix, getattr(self._connection.limits, "deadline", None)
        if deadline is None or limit_sec is not None:
            own = time.monotonic() + (self.limit_sec if limit_sec is None else limit_sec)
            deadline = own if deadline is None else min(own, deadline)
        return self._connection.ask(lambda store: question(store, prefix), deadline, watch)

    def renew(self) -> None:
        """Leave the connection to a request that goes on, if there is one, and take another."""
        self._connection.renew()

    def set(self, key: str, value: str | bytes) -> None:
        self.use(lambda store, prefix: store.set(prefix + key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is known to exist."""
        return self.use(lambda store, prefix: bytes(store.get(prefix + key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.use(lambda store, prefix: list(map(bytes, store.multi_get([prefix + key for key in keys]))))

    def check(self, keys: Sequence[str]) -> bool:
        return self.use(lambda store, prefix: bool(store.check([prefix + key for key in keys])))

    def absent(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that do not exist. One request where all exist, otherwise a few for each that does not."""
        if not keys or self.check(keys):
            return []
        half = len(keys) // 2
        return [*self.absent(keys[:half]), *self.absent(keys[half:])] if half else list(keys)

    def read_present(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of the keys that exist."""
        absent = set(self.absent(keys))
        present = [key for key in keys if key not in absent]
        return dict(zip(present, self.multi_get(present) if present else [], strict=True))

    def find(self, key: str) -> bytes | None:
        """Return the value, or None; does not wait for a rank to write it.

        One request: between two, another rank may delete the key, and torch's ``get`` would wait for it.
        """
        value = self.replace(key, _ABSENT, _ABSENT)  # no key has that value, so nothing is replaced
        return None if value == _ABSENT.encode() else value

    def post(self, key: str, value: str) -> bytes:
        """Write ``value`` unless the key exists; return its value now. So the first rank's value is that of all."""
        return self.replace(key, "", value)

    def post_later(self, key: str, value: str) -> None:
        """Do the same when the store answers, if it ever does; waits a moment at most, and reports no error."""
        prefix = self._prefix
        with suppress(*STORE_ERRORS):
            self._connection.ask(lambda store: store.compare_set(prefix + key, "", value), 0.0, is_dropped=False)

    def replace(self, key: str, expected: str, value: str) -> bytes:
        """Write ``value`` where the value is ``expected`` or the key does not exist; return its value now."""
        return self.use(lambda store, prefix: bytes(store.compare_set(prefix + key, expected, value)))

    def add(self, key: str, amount: int) -> int:
        """Count, and return the sum."""
        return self.use(lambda store, prefix: int(store.add(prefix + key, amount)))

    def counted(self, key: str) -> int:
        """Return the sum of `add`. One request, and no `add` of 0: a `FileStore` would write that down."""
        return int(self.find(key) or 0)

    def delete_key(self, key: str) -> bool:
        return self.use(lambda store, prefix: bool(store.delete_key(prefix + key)))


def bounded(store: Any) -> BoundedStore:
    """Return ``store`` itself where it has a limit already; otherwise one that asks it, over its own connection."""
    return store if isinstance(store, BoundedStore) else BoundedStore(lambda: store)


class StoreLog:
    """Notes of many ranks under one name of a store, in the order in which they came.

    `append` counts, and writes the note under the number that it got. `unread` asks for the count, and reads the notes
    that this reader has not read yet: a look without news is one request that writes nothing, however many ranks there
    are. A writer that dies between its two steps leaves a number without a note, which is asked for again each time.
    """

    def __init__(self, store: BoundedStore, name: str) -> None:
        self._store, self._name = store, name
        self._read = 0, list[str]()  # the last number, and keys before it without a note: one attribute, for threads

    def append(self, rank: int, note: str | bytes) -> None:
        """Write a note of this ``rank``; never waits for another one."""
        note = note.encode() if isinstance(note, str) else note
        self._store.set(f"{self._name}/{self._store.add(self._name, 1)}", b"%d %b" % (rank, note))

    def unread(self) -> dict[int, bytes]:
        """Return the newest note since the last time of each rank; never waits for one.

        Two threads may get the same notes. Bytes that are no note are left out.
        """
        read, pending = self._read
        counted = self._store.counted(self._name)
        keys = [*pending, *(f"{self._name}/{number}" for number in range(read + 1, counted + 1))]
        notes = self._store.read_present(keys)
        self._read = counted, [key for key in keys if key not in notes]
        parts = [note.partition(b" ") for note in notes.values()]
        return {int(rank): note for rank, _, note in parts if rank.isdigit() and len(rank) < 10}
