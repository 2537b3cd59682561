"""The calls of one group: one at a time, in call order, over a gloo group beside the user's.

1. All reducers of a group share its channel (`channel_of`). A call with nothing pending runs on the caller's thread;
   `Channel.submit` hands a call to the one worker, and calls that follow queue behind it.
2. The first call waits for all ranks, connects them, and proves that all speak one protocol.
3. Each call has one deadline, whatever it takes inside: `Agreement.deadline`, which every collective counts down to.
4. A failed collective closes the channel: every later call raises the verdict on it (`failure`).
"""

from __future__ import annotations

import atexit
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from ddpstats._base.lazy import refuse_without_values
from ddpstats._base.text import first_line, holders_lines
from ddpstats._base.version import __version__
from ddpstats._ranks.agreement import Agreement
from ddpstats._ranks.comm import (
    Comm,
    CommFailed,
    SoloComm,
    Watch,
    describe_group,
    group_ranks,
    group_store,
    last_moment,
    resolve_group,
    slice_sec,
)
from ddpstats._ranks.exchange import PROTOCOL_VERSION
from ddpstats._ranks.failure import PROCESS_ID_BYTES, FailureDetector, ProcessId, Verdict
from ddpstats._ranks.grid import gloo_comm
from ddpstats._ranks.store import Worker
from ddpstats.errors import ConfigError, DdpstatsError, ProtocolMismatch, RankMissing

# The one message whose size may never change: versions with other buffers must be able to read it.
_HELLO = struct.Struct(f"<8sH32s{PROCESS_ID_BYTES}s")
_MAGIC = b"ddpstats"
_CLOSING = "Reductions on this group are closed."
_POLL_SEC = 5.0
_WAKE_SEC = 0.1  # between two looks whether the turn is free
_EXIT_SEC = 10.0  # how long a process that ends waits for reductions that were started

T = TypeVar("T")
Work = Callable[[Agreement], T]
# Makes the connection to the other ranks, within so many seconds; raises `CommFailed`, and what its watch raises.
Connect = Callable[[float, Watch], Comm]


class Reentered(ConfigError):
    """Raised on this rank alone, before anything is sent."""


class Channel:
    """The reductions of one group. Made by `channel_of`."""

    def __init__(self, ranks: tuple[int, ...], rank: int, group_name: str, connect: Connect, store: Any = None) -> None:
        self.ranks, self.rank, self.group_name = ranks, rank, group_name  # global ranks; this process's own
        self._process, self._connect, self._what = os.getpid(), connect, f"a reduction on {group_name}"
        self._worker = Worker("ddpstats")
        self._turn = threading.Condition()
        self._turn_of: dict[str, int] = {}  # the thread that performs a call; `setdefault` takes the turn in one step
        self._busy: set[int] = set()  # threads that hold a lock which a signal's handler on them would wait for
        self._detector: FailureDetector | None = None  # alone there is no rank to miss
        if len(ranks) > 1:
            self._detector = FailureDetector(store, rank, ranks, self._what, closing=_CLOSING)
        self._comm: Comm | None = None
        self._agreement: Agreement | None = None
        self._error: RankMissing | None = None

    # -- in order -----------------------------------------------------------------------------------------------------

    def run(self, work: Work[T], timeout_sec: float) -> T:
        """Run ``work`` in turn; on this thread if nothing is pending."""
        self.refuse_inside()
        self.refuse_here()
        thread = threading.get_ident()
        try:
            if self._worker.unfinished == 0 and self._turn_of.setdefault("call", thread) == thread:
                return self._perform(work, timeout_sec)
        finally:
            # Without a call in between: Python runs a signal's handler, which may raise, only at calls.
            if self._turn_of == {"call": thread}:
                del self._turn_of["call"]
                if self._worker.unfinished:  # only its thread waits for a turn, for calls that were counted before
                    self._wake_worker()
        future = self.submit(work, timeout_sec)
        with self._refusing_inside():
            return future.result()

    def _wake_worker(self) -> None:
        with self._refusing_inside(), self._turn:
            self._turn.notify()

    @contextmanager
    def _refusing_inside(self) -> Iterator[None]:
        """Let `refuse_inside` raise on this thread meanwhile."""
        thread = threading.get_ident()
        try:
            self._busy.add(thread)
            yield
        finally:
            self._busy.discard(thread)

    def submit(self, work: Work[T], timeout_sec: float) -> Future[T]:
        """Run ``work`` in turn on the worker's thread; at once returns a future."""
        self.refuse_here()
        with self._refusing_inside():
            return self._worker.submit(lambda: self._run_in_turn(work, timeout_sec))

    def _run_in_turn(self, work: Work[T], timeout_sec: float) -> T:
        thread = threading.get_ident()
        try:
            with self._turn:
                # The call under way has a deadline. A signal's handler that raises may keep it from waking this thread.
                while not self._turn.wait_for(lambda: self._turn_of.setdefault("call", thread) == thread, _WAKE_SEC):
                    pass
            return self._perform(work, timeout_sec)
        finally:
            if self._turn_of == {"call": thread}:
                del self._turn_of["call"]

    def refuse_inside(self) -> None:
        """Raise where this thread is in the middle of a reduction on this group: what it waits for cannot come."""
        thread = threading.get_ident()
        if thread == self._turn_of.get("call") or thread in self._busy:
            raise Reentered(
                f"a reduction on {self.group_name} was asked for in the middle of another one, on the same thread: by "
                "the handler of a signal, or by what runs when an object is collected. It cannot wait for the one that "
                "it interrupts. Set a flag there, and reduce at the next step of the program."
            )

    def refuse_here(self) -> None:
        """Raise where nothing can be reduced: while torch traces the program, and in a forked process."""
        refuse_without_values(self._what)
        if os.getpid() != self._process and self._detector is not None:
            refuse_in_fork(self.rank)

    def wait(self, future: Future[T]) -> bool:
        """Wait for a call that was submitted. Returns False where it cannot end: its thread ended, or waits here."""
        while not futures.wait([future], _POLL_SEC).done:
            if (not self._worker.is_alive() or self._worker.is_current()) and not future.done():
                return False
        return True

    def _perform(self, work: Work[T], timeout_sec: float) -> T:
        if self._error is not None:
            raise self._error.with_traceback(None)
        started = time.monotonic()
        try:
            agreement = self._agreement or self._first_use(started, timeout_sec)
            agreement.deadline = last_moment(started, timeout_sec)
            return work(agreement)
        except CommFailed as error:
            assert self._detector is not None
            verdict = self._detector.decide(
                0 if self._agreement is None else self._agreement.collectives,
                str(error),
                is_broken=error.is_broken,
                is_late=error.is_late,
                started=started,
                deadline=max(started + timeout_sec, time.monotonic() + 2 * slice_sec(timeout_sec)),
            )
        except Reentered as error:  # a signal's handler let it pass: the reduction around it ends in the middle
            self._leave(error)
            raise
        except DdpstatsError:
            raise  # all ranks came to it, and stay in step
        except Exception as error:  # this rank alone: damaged bytes, no memory
            raise self._leave(error) from error
        except BaseException as error:  # an interrupt is the program's own business
            self._leave(error)
            raise
        raise self._close_with(verdict)

    def note(self, text: str) -> None:
        """Write what the errors of ranks that miss this one are to say; an empty text takes it back. Local."""
        if self._detector is not None and (text or self._detector.own_note):
            self._detector.note(text)

    def leave_by_note(self) -> None:
        """Take no further part if this rank left a note: all ranks raise it, here and at every later call."""
        if self._detector is not None and self._detector.own_note:
            text = "\n".join([*self._detector.own_note.values(), f"It takes no further part. {_CLOSING}"])
            self._close_with(self._detector.publish(Verdict((self._detector.rank,), text)))

    def explain(self, error: BaseException) -> RankMissing | None:
        """Return the reason why a connection of the program's own broke with ``error``; None where no rank left a note.

        Closes the group: all ranks raise the same.
        """
        verdict = None if self._detector is None else self._detector.explain(first_line(error))
        return None if verdict is None else self._close_with(verdict)

    def wait_until(self, is_done: Callable[[], bool], what: str, timeout_sec: float) -> None:
        """Do as `Agreement.wait_for`, within so many seconds; nothing where this rank is alone."""
        if self._detector is not None and not is_done():
            self.run(lambda agreement: agreement.wait_for(is_done, what), timeout_sec)

    def _leave(self, error: BaseException) -> BaseException:
        """Close the group: an error took this rank out of the middle of a call, and others may not wait for it."""
        if self._detector is None:
            return error
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return self._close_with(self._detector.leave(why))

    def _close_with(self, verdict: Verdict) -> RankMissing:
        self._error = RankMissing(verdict.message, missing_ranks=verdict.missing, group=self.group_name)
        self.close()
        return self._error

    def close(self) -> None:
        """Leave the group. Local; calls that follow fail."""
        if self._comm is not None:
            self._comm.close()

    # -- first use ----------------------------------------------------------------------------------------------------

    def _first_use(self, started: float, timeout_sec: float) -> Agreement:
        """Wait for all ranks, connect, and prove that all speak one protocol, before a buffer of any layout is sent."""

        def left_sec() -> float:
            return last_moment(started, timeout_sec) - time.monotonic()

        detector = self._detector
        if detector is None:
            self._agreement = Agreement(self._connect(timeout_sec, lambda: None), self.group_name)
            return self._agreement
        if self._comm is None:
            verdict = detector.rendezvous(started + timeout_sec - slice_sec(timeout_sec), slice_sec(timeout_sec))
            if verdict is not None:
                raise self._close_with(verdict)
            self._comm = self._connect(left_sec(), detector.find_dead)  # the connection to the store is busy meanwhile
            self._comm.watch = detector.poll
        detector.members.set_processes(self._shake_hands(self._comm, left_sec()))
        self._agreement = Agreement(self._comm, self.group_name)
        return self._agreement

    def _shake_hands(self, comm: Comm, timeout_sec: float) -> dict[int, ProcessId]:
        hello = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, __version__.encode()[:32], ProcessId.mine().pack())
        versions: dict[int, str] = {}
        processes: dict[int, ProcessId] = {}
        for rank, received in zip(comm.ranks, comm.all_gather(hello, timeout_sec), strict=True):
            magic, protocol, version, process = _HELLO.unpack(received)
            text = f"ddpstats {version.rstrip(bytes(1)).decode(errors='replace')}, protocol {protocol}"
            versions[rank] = text if magic == _MAGIC else "no ddpstats"
            processes[int(rank)] = ProcessId.unpack(process)
        if len(set(versions.values())) > 1:
            lines = [f"ranks of {self.group_name} run different versions:", *holders_lines(versions)]
            lines.append("Install the same version of ddpstats on all of them.")
            raise ProtocolMismatch("\n".join(lines), ranks=comm.ranks, group=self.group_name)
        return processes


# -- which channel ----------------------------------------------------------------------------------------------------

# In place of a group: this process only, whatever groups exist.
ALONE = object()

_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()
_alone: dict[int, Channel] = {}  # by this process's rank
_lock = threading.Lock()
_HAS_GROUPS = dist.is_available()


def _close_all() -> None:
    """Close all groups: a thread, gloo's or ours, that asks for the GIL while Python ends aborts the process."""
    for channel in list(_channels.values()):
        if os.getpid() == channel._process and channel._worker.join(_EXIT_SEC):
            channel.close()


atexit.register(_close_all)

# The default group of the process that this one was forked from, if there was one.
_inherited: weakref.ref[dist.ProcessGroup] | None = None


def _in_fork() -> None:
    global _inherited, _lock
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    _inherited = None if world is None else weakref.ref(world)
    _alone.clear()  # a thread that is not here may have been in the middle of a call, or have held the lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_fork)


def refuse_in_fork(rank: int) -> NoReturn:
    """Raise `ConfigError`: two processes on one connection would take each other's answers."""
    raise ConfigError(
        f"this process was forked from rank {rank}, as workers of a DataLoader are: it is no rank of its process "
        "group, and the connections to the other ranks are not its own. Reduce in the rank itself: let the worker "
        "return the values with the batch."
    )


def channel_of(group: Any) -> Channel:
    """Return the channel of ``group`` (None: the default group); one for this process where there is no other rank.

    Raises ``ConfigError`` on a rank that is not a member. Local: the ranks' rendezvous is at the first reduction.
    """
    world = dist.group.WORLD if group is None and _HAS_GROUPS else None
    channel = None if world is None else _channels.get(world)
    return channel or _find_channel(group)


def _find_channel(group: Any) -> Channel:
    own = getattr(group, "channel", None)
    if isinstance(own, Channel):  # ranks that are threads (`ddpstats.testing`)
        return own
    resolved = None if group is ALONE else resolve_group(group)
    if resolved is None or resolved.size() == 1:
        return _channel_alone()
    with _lock:
        channel = _channels.get(resolved)
        if channel is None:
            if _inherited is not None and _inherited() is dist.group.WORLD:
                refuse_in_fork(dist.get_rank())
            channel = _channels[resolved] = _new_channel(resolved)
        return channel


def _channel_alone() -> Channel:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    with _lock:
        if rank not in _alone:
            _alone[rank] = Channel((rank,), rank, "a single process", lambda timeout_sec, watch: SoloComm(rank))
        return _alone[rank]


def _new_channel(group: dist.ProcessGroup) -> Channel:
    reference, store = weakref.ref(group), group_store(group)

    def connect(timeout_sec: float, watch: Watch) -> Comm:
        alive = reference()
        if alive is None:
            raise CommFailed("the process group was destroyed")
        return gloo_comm(alive, store, timeout_sec, watch)

    return Channel(group_ranks(group), dist.get_rank(), describe_group(group), connect, store)
