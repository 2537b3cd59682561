"""A store that answers within a limit, or counts as silent.

A request to a `TCPStore` waits in C++ for as long as its connection is open: a server that is stopped, or cut off from
the network, keeps its clients for ever (torch 2.13, measured: `check`, `set`, `clone`; the store's own timeout counts
for keys that are missing, and for a connection that is refused again and again). Hence:

1. Requests run on a thread of the connection's, which ends a moment after the last. The caller waits for as long as it
   may.
2. A request that was given up goes on: nothing ends it but the answer, or the end of the connection. The next one on
   that connection waits for it first.
3. Where an answer takes long, a look at the server's port tells whether anybody listens there. If not, the process that
   served the store is gone, and no deadline is worth waiting for. The looks become rarer: each is a connection, for
   which torch's server first asks the name service who that is.
"""

from __future__ import annotations

import atexit
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

STORE_ERRORS = (RuntimeError, OSError, ValueError)
"""What a request may raise: the store is gone or silent, or holds what nobody of ours wrote."""

GLANCE_SEC = 0.5  # of a look that is repeated where the store is silent
LIMIT_SEC = 10.0  # of a request whose caller names no limit
_LONG_SEC = 1.0  # from when on an answer takes long
_LEAST_SEC = 0.05  # of a deadline that has passed: what is there may still be read
_KNOCK_SEC = 0.5
_LEAVE_SEC = 5.0  # of all threads, at the end of the process
_LINGER_SEC = 0.05  # of a thread without a request: to start one costs more than to ask the store

_NO_COUNT = "none"
_LOOKS_PER_SEC = 5000  # of all ranks together at a store: one thread of one process answers them all

Address = tuple[str, int]


def shared_poll(poll_sec: float, ranks: int) -> float:
    """How often one of so many ranks may look into the store, so that all of them together do not keep it busy."""
    return max(poll_sec, ranks / _LOOKS_PER_SEC)


def growing_polls(longest_sec: float) -> Iterator[float]:
    """Short sleeps first, long ones later. Not the store's own wait, which reports each of its timeouts on stderr."""
    poll_sec = min(0.005, longest_sec)
    while True:
        yield poll_sec
        poll_sec = min(1.5 * poll_sec, longest_sec)


class StoreSilent(OSError):
    """The store did not answer in time."""


class StoreGone(OSError):
    """Nobody serves the store any more."""


class _Request:
    """One request on its way."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask: Callable[[], Any] | None = ask
        self._value: Any = None
        self._error: BaseException | None = None
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def run(self) -> None:
        assert self._ask is not None
        try:
            self._value = self._ask()
        except BaseException as error:
            self._error = error
        self._ask = None  # first: a signal's handler may ask between a waiter's two steps below
        self._under_way.release()

    def done_within(self, seconds: float) -> bool:
        if self._ask is not None and self._under_way.acquire(timeout=max(0.0, seconds)):
            self._under_way.release()
        return self._ask is None

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class _Worker:
    """Runs one request after another on a thread, which ends when none has come for a moment."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal's handler may come in between
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, request: _Request) -> None:
        if sys.is_finalizing():  # no other thread runs any more
            request.run()
            return
        with self._lock:
            self._requests.put(request)
            if self._thread is not None and self._thread.is_alive():  # it is not in a forked process
                return
            self._thread = threading.Thread(target=self._run, name="ddpstats-store", daemon=True)
            _at_work.add(self)
            try:
                self._thread.start()
            except RuntimeError:  # Python is ending, and starts no threads any more
                self._thread = None
                self._run()

    def _run(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=0.0 if _is_ending else _LINGER_SEC)
            except queue.Empty:
                request = None
            if request is not None:
                request.run()
                del request
                continue
            with self._lock:
                if self._requests.empty():
                    self._thread = None
                    _at_work.discard(self)
                    return

    def end(self, deadline: float) -> None:
        """Let the thread end now that lingers after its last request, and wait for it, but not for long: what it asked
        may never be answered. The next request starts another."""
        with self._lock:
            thread = self._thread
            if thread is None or thread is threading.current_thread():
                return
            self._requests.put(None)
        thread.join(max(0.0, deadline - time.monotonic()))


_at_work: set[_Worker] = set()  # those that have a thread; a list of it is made in one step, whatever threads do
_is_ending = False


def rest(patience_sec: float = 2 * _LINGER_SEC) -> None:
    """Let the threads end that have nothing to ask, and would do so in a moment. Never waits for an answer for long."""
    deadline = time.monotonic() + patience_sec
    for worker in list(_at_work):
        worker.end(deadline)


def _end_all() -> None:
    """At exit, after the modules above: a thread that asks for the GIL while Python ends aborts the process."""
    global _is_ending
    _is_ending = True
    rest(_LEAVE_SEC)


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_at_work.clear)  # their threads are the other process's


class _Connection:
    """One connection to a store, and whoever uses it in turn."""

    def __init__(self, connect: Callable[[], Any], address: Address | None) -> None:
        """``connect`` is called once, on a thread; ``address``: where the store is served, if that is known."""
        self.address = address
        self._doors: list[Address] = []  # what the address stands for; looked up once, on a thread: that has no limit
        self._are_doors_known = threading.Event()
        self.turn = threading.RLock()  # re-entrant: a signal's handler may come in between
        self.limits = threading.local()
        self._connect: Callable[[], Any] | None = connect
        self._store: Any = None
        self._refusal: BaseException | None = None
        self._worker, self._process = _Worker(), os.getpid()
        self._running: _Request | None = self._started(self.store)

    def _started(self, ask: Callable[[], Any]) -> _Request:
        request = _Request(ask)
        self._worker.start(request)
        return request

    def store(self) -> Any:
        """The store itself, connected. On a request's thread."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if self._connect is not None:
            connect, self._connect = self._connect, None  # and with it the store that it came from
            try:
                with suppress(OSError, ValueError):
                    found = [] if self.address is None else socket.getaddrinfo(*self.address, type=socket.SOCK_STREAM)
                    self._doors = [(str(one[4][0]), int(one[4][1])) for one in found]
                self._are_doors_known.set()
                if self.is_served() is False:  # torch would knock until the store's own timeout is over
                    raise StoreGone("nobody serves it any more")
                self._store = connect()
            except BaseException as error:
                self._refusal = error
                raise
        return self._store

    def ask(self, question: Callable[[Any], T], deadline: float, watch: Callable[[], None] | None) -> T:
        """What ``question`` says of the store. Raises what it raises, what ``watch`` raises, and `StoreSilent`."""
        if os.getpid() != self._process:  # forked from it: two processes would take each other's answers
            raise OSError("this process was forked from the one whose connection to the store it is")
        if not self.turn.acquire(timeout=max(_LEAST_SEC, deadline - time.monotonic())):
            raise StoreSilent("no answer in time")
        try:
            if self._running is not None:
                self._await(self._running, deadline)
            self._running = request = self._started(lambda: question(self.store()))
            self._await(request, deadline, watch)
            if self._running is request:
                self._running = None
        finally:
            self.turn.release()
        found: T = request.result()
        return found

    def _await(self, request: _Request, deadline: float, watch: Callable[[], None] | None = None) -> None:
        looks, looks_at = 0, time.monotonic()
        while not request.done_within(max(_LEAST_SEC, min(_LONG_SEC, deadline - time.monotonic()))):
            if watch is not None:
                watch()
            if time.monotonic() >= looks_at:
                if self.is_served() is False:
                    raise StoreGone("nobody serves it any more")
                looks += 1
                looks_at = time.monotonic() + _LONG_SEC * 2**looks
            if time.monotonic() >= deadline:
                raise StoreSilent("no answer in time")

    def is_served(self) -> bool | None:
        """Whether a process listens where the store is served; None where no answer comes, or that is not known."""
        served = None
        self._are_doors_known.wait(0.0 if self.address is None else _KNOCK_SEC)
        for door in self._doors:
            try:
                socket.create_connection(door, _KNOCK_SEC).close()
            except OSError as error:
                served = False if isinstance(error, ConnectionRefusedError) else None
            else:
                return True
        return served

    def renew(self) -> None:
        """Leave the connection to a request that was given up, and take a new one."""
        with self.turn:
            if self._running is not None and not self._running.done_within(0.0) and self._store is not None:
                self._connect, self._store = self._store.clone, None
                self._running, self._worker = None, _Worker()


class _InThisProcess(_Connection):
    """A store in the memory of this process, which threads that play ranks share: it answers at once."""

    def __init__(self, store: Any) -> None:
        self.address, self._doors, self._are_doors_known = None, [], threading.Event()
        self.limits, self._store = threading.local(), store

    def ask(self, question: Callable[[Any], T], deadline: float, watch: Callable[[], None] | None) -> T:
        return question(self._store)

    def renew(self) -> None:
        pass


class BoundedStore:
    """A part of a store: torch's methods, each with a limit. Parts of one store share a connection.

    ``host_rank``: the global rank whose process serves the store; None where that is no rank, or not known.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        address: Address | None = None,
        host_rank: int | None = None,
        limit_sec: float = LIMIT_SEC,
    ) -> None:
        """Begins to connect, and waits for nobody."""
        self.host_rank, self.limit_sec = host_rank, limit_sec
        self._connection = _Connection(connect, address)
        self._prefix = ""

    def part(self, prefix: str, limit_sec: float | None = None) -> BoundedStore:
        """A part of this part, over the same connection."""
        made = BoundedStore.__new__(BoundedStore)
        made.host_rank, made._connection = self.host_rank, self._connection
        made.limit_sec = self.limit_sec if limit_sec is None else limit_sec
        made._prefix = f"{self._prefix}{prefix}/"
        return made

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """This thread's requests inside are over in so many seconds, all together."""
        limits, deadline = self._connection.limits, time.monotonic() + seconds
        before = getattr(limits, "deadline", None)
        limits.deadline = deadline if before is None else min(before, deadline)
        try:
            yield
        finally:
            limits.deadline = before

    def use(
        self,
        question: Callable[[Any, str], T],
        limit_sec: float | None = None,
        watch: Callable[[], None] | None = None,
    ) -> T:
        """``question`` of (the store itself, the prefix of this part's keys), within the limit.

        ``watch`` is called about once a second meanwhile; it may raise, and must not ask this store.
        """
        prefix, deadline = self._prefix, getattr(self._connection.limits, "deadline", None)
        if deadline is None or limit_sec is not None:
            own = time.monotonic() + (self.limit_sec if limit_sec is None else limit_sec)
            deadline = own if deadline is None else min(own, deadline)
        return self._connection.ask(lambda store: question(store, prefix), deadline, watch)

    def renew(self) -> None:
        """Leave the connection to a request that was given up, if there is one, and take another."""
        self._connection.renew()

    def is_served(self) -> bool | None:
        """Whether a process listens where the store is served, as one does that is stopped; None: cannot be told."""
        return self._connection.is_served()

    def set(self, key: str, value: str | bytes) -> None:
        self.use(lambda store, prefix: store.set(prefix + key, value))

    def get(self, key: str) -> bytes:
        """Of a key that is known to be there."""
        return self.use(lambda store, prefix: bytes(store.get(prefix + key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.use(lambda store, prefix: list(map(bytes, store.multi_get([prefix + key for key in keys]))))

    def check(self, keys: Sequence[str]) -> bool:
        return self.use(lambda store, prefix: bool(store.check([prefix + key for key in keys])))

    def absent(self, keys: Sequence[str]) -> list[str]:
        """Those that nobody has written yet. One request where there are none, else a few for each of them."""
        if not keys or self.check(keys):
            return []
        half = len(keys) // 2
        return [*self.absent(keys[:half]), *self.absent(keys[half:])] if half else list(keys)

    def find(self, key: str) -> bytes | None:
        """What is there, if anything; waits for nobody to write it."""

        def look(store: Any, prefix: str) -> bytes | None:
            return bytes(store.get(prefix + key)) if store.check([prefix + key]) else None

        return self.use(look)

    def post(self, key: str, value: str) -> bytes:
        """Write ``value`` unless something is there; what is there now. So who is first says it for all."""
        return self.replace(key, "", value)

    def replace(self, key: str, expected: str, value: str) -> bytes:
        """Write ``value`` where ``expected`` is there, or nothing; what is there now."""
        return self.use(lambda store, prefix: bytes(store.compare_set(prefix + key, expected, value)))

    def add(self, key: str, amount: int) -> int:
        """Count; what is there now."""
        return self.use(lambda store, prefix: int(store.add(prefix + key, amount)))

    def counted(self, key: str) -> int:
        """What `add` has counted so far. One request, and no `add` of 0: a `FileStore` would write that down."""
        found = self.replace(key, _NO_COUNT, _NO_COUNT)  # which stands nowhere, so nothing is replaced
        return 0 if found in (b"", _NO_COUNT.encode()) else int(found)

    def delete_key(self, key: str) -> bool:
        return self.use(lambda store, prefix: bool(store.delete_key(prefix + key)))


def bounded(store: Any) -> BoundedStore:
    """``store`` itself where it has a limit already; else one that is asked as it is, over its own connection."""
    if isinstance(store, BoundedStore):
        return store
    made = BoundedStore.__new__(BoundedStore)
    made.host_rank, made.limit_sec, made._prefix = None, LIMIT_SEC, ""
    made._connection = (
        _InThisProcess(store) if type(store).__name__ == "HashStore" else _Connection(lambda: store, None)
    )
    return made
