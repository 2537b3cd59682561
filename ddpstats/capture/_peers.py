"""A rank that raises inside its micro-batch: how the others learn of it, although they wait in a collective for it.

1. The rank announces in the group's store what happened, beside where `Channel` keeps verdicts, and takes no further
   part: its next micro-batch raises `RankMissing`. The first one to announce is the one that all others name.
2. A rank that waits in `NaNCapture.check` looks there while it waits, and raises `RankMissing` with that text; so does
   one that begins a micro-batch.
3. A rank whose own collective breaks because the other process has ended (gloo: "Connection closed by peer") looks
   there before it lets that error go on, and raises `RankMissing` from it.
4. A rank that sits in a collective of the program's own while the process of the rank that raised lives on cannot be
   reached: gloo's waits end by their timeout (30 minutes) or by the connection's end, and by nothing else (torch 2.13:
   neither abort() nor shutdown() of either side ends them). So a thread looks into the store while a micro-batch takes
   long. Where another rank has announced, this one has not, and the thread of the micro-batch does not move, it ends
   this process, saying why on stderr: as torch's own watchdog does under NCCL.

Reductions that broke for another reason (a `StatsReducer` that timed out) are no reason to end anything: `check` raises
that verdict.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from ddpstats._base.text import ranks_text
from ddpstats._ranks.calls import Channel
from ddpstats._ranks.store import shared_poll
from ddpstats.errors import DdpstatsError, RankMissing

POLL_SEC = 1.0
LONG_SEC = 2.0  # from when on a micro-batch takes long enough to look into the store
GRACE_SEC = 3.0  # what a rank has to come out of its collective by itself
_IDLE_SEC = 0.1  # of a core, within GRACE_SEC: who waits takes none, who computes takes more on a busy machine, too
EXIT_STATUS = 1
_LOOK_SEC = 1.0  # micro-batches may be short, and one host answers for the store of all ranks
_LOST = (
    "gloo/transport",  # the file in which gloo raises, for all that happens to a connection (torch 2.13)
    "ncclremoteerror",
    "closed by remote peer",
    "communicator was aborted",
    "collective operation timeout",
)
"""In what gloo raises as a plain RuntimeError, and NCCL as a DistBackendError."""
_WORKER = "in dataloader worker"  # whose connections are its own
_EXPLAIN_SEC = 2.0


class Peers:
    """The other ranks of the group, from this one's point of view. Local."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.ranks, self.rank = channel.ranks, channel.rank
        self._alone = len(self.ranks) == 1
        self._ended: RankMissing | None = None
        self._looked = -_LOOK_SEC
        self._since: float | None = None  # a micro-batch is under way
        self._waiting = self._waiting_native = 0  # the thread of the micro-batch, to Python and to the system
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def refuse_if_ended(self) -> None:
        """Before a micro-batch begins, and before anything of it is set up.

        Raises:
            RankMissing: some rank, this one perhaps, raised in an earlier one and takes no further part.
        """
        if not self._alone and self._ended is None and time.monotonic() - self._looked >= self._look_sec(_LOOK_SEC):
            self._ended = self._channel.abandoned()
            self._looked = time.monotonic()
        if self._ended is not None:
            raise self._ended.with_traceback(None)

    def _look_sec(self, poll_sec: float) -> float:
        return shared_poll(poll_sec, len(self.ranks))

    def enter(self) -> None:
        """A micro-batch begins: this rank may soon wait for others, and a thread looks after it."""
        self._waiting, self._waiting_native = threading.get_ident(), threading.get_native_id()
        self._since = time.monotonic()
        if self._thread is None and not self._alone:
            self._thread = threading.Thread(target=self._watch, name="ddpstats-capture", daemon=True)
            self._thread.start()
            # A thread that asks for the GIL while Python ends aborts the process.
            atexit.register(self.close)

    def leave(self) -> None:
        """The micro-batch is through."""
        self._since = None

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10 * POLL_SEC)
            atexit.unregister(self.close)

    def announce(self, error: Exception, where: str, bundle: Path | None) -> None:
        """Tell the others that this rank raised, and takes no further part."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        site = f" ({last[0].filename}:{last[0].lineno})" if last else ""
        lines = [f"{ranks_text([self.rank])} raised in {where}: {type(error).__name__}: {error}{site}"]
        if bundle is not None:
            lines.append(f"What it had of that step: {bundle}")
        lines.append("It takes no further part, and the other ranks stop. Reductions on this group are closed.")
        self._ended = self._channel.abandon("\n".join(lines))

    def explain(self, error: BaseException) -> RankMissing | None:
        """The reason behind a connection that broke, where another rank gave one."""
        if self._alone or not self.is_lost_connection(error):
            return None
        deadline = time.monotonic() + _EXPLAIN_SEC
        while True:
            found = self._channel.abandoned()
            if found is not None or time.monotonic() > deadline:
                return found
            time.sleep(self._look_sec(0.05))

    def is_lost_connection(self, error: BaseException) -> bool:
        """Whether that is no fault of this rank's own, but of the connection to another one."""
        if isinstance(error, RankMissing):
            return True
        if not isinstance(error, RuntimeError) or isinstance(error, DdpstatsError):
            return False
        text = str(error).lower()
        return any(word in text for word in _LOST) and _WORKER not in text

    def _watch(self) -> None:
        """Ends this process where it waits for a rank that has said that it will not come."""
        while not self._stop.wait(self._look_sec(POLL_SEC)):
            since = self._since
            if since is None or time.monotonic() - since < LONG_SEC:
                continue
            found = self._channel.abandoned()
            # A rank that announced as well is waited for itself.
            if found is not None and not self._channel.has_abandoned and self._sits_still(since):
                _end_process(found)

    def _sits_still(self, since: float) -> bool:
        """Whether the micro-batch that began then stays where it is for longer than it may take to notice by itself.

        A loop in Python is left for other threads at the same instruction each time; it takes time of a core, though.
        """
        where, used_sec = _position(self._waiting), _cpu_sec(self._waiting_native)
        deadline = time.monotonic() + GRACE_SEC
        while time.monotonic() < deadline:
            if self._since != since or self._stop.wait(0.05) or _position(self._waiting) != where:
                return False
        return where is not None and _cpu_sec(self._waiting_native) - used_sec < _IDLE_SEC


def _position(thread: int) -> tuple[int, int, int | None] | None:
    """Where in its Python code a thread is; None where it is not."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else (id(frame), frame.f_lasti, frame.f_lineno)


def _cpu_sec(native_thread: int) -> float:
    """What a thread has had of a core; 0 where the system does not tell."""
    try:
        with open(f"/proc/self/task/{native_thread}/stat", "rb") as file:
            user, system = file.read().rpartition(b")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _end_process(reason: RankMissing) -> None:
    print(
        f"ddpstats: {reason}\nThis process waits for that rank in a collective that nothing but its timeout would end. "
        "It ends now; this is where it waited:",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    os._exit(EXIT_STATUS)
