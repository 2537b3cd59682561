"""One verdict is printed once, not once per rank: how an error of the guard's that nobody catches reaches people.

Every rank raises the same error. Where it gets as far as `sys.excepthook`, or is found when the program has ended
already,

1. the first rank that is alive prints it whole, without the frames of this package;
2. the others wait until it has, and print one line that points there;
3. all write one line where torchrun looks (``TORCHELASTIC_ERROR_FILE``), with the time at which it happened: torchrun
   ends its output with what happened first, however many ranks there are. That line has the calls and what differs,
   and says which rank's output has the rest.

Then the process ends. A collective that was given up would keep it until the group's own timeout (torch 2.13's gloo
group waits, when it is destroyed, for all that runs in it: 30 minutes), and torchrun, which waits for a rank that
fails, would not end the others: so such a group is never destroyed.

A rank that fails makes torchrun end the others, within a tenth of a second. So SIGTERM waits (`signal_deferred`) while
ranks are about to find out what has happened, and to say so; each of these waits is bounded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from ddpstats._base.files import parse_json
from ddpstats._ranks.store import STORE_ERRORS
from ddpstats.errors import DdpstatsError
from ddpstats.guard.failure_agreement import FailureAgreement, wait_until

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = tuple(
    os.path.join(_PACKAGE, part)
    for part in (
        "guard" + os.sep,
        os.path.join("_observe", "collectives.py"),
        os.path.join("_ranks", "gloo.py"),
        "cli.py",
        "__main__.py",
    )
)

_verdicts: dict[int, tuple[DdpstatsError, FailureAgreement, Sequence[int]]] = {}  # by id
_raised_at: dict[int, float] = {}
_told: set[int] = set()
_MARK = "told_by_ddpstats"
_TELLING_SEC = 5.0
_LINGER_SEC = 2.0
_STILL_NEWS_SEC = 10.0  # a verdict that the program has caught is not told when the program is ended later
_hooked: Callable[..., Any] | None = None

Show = Callable[[], None]
_given_up: list[tuple[Any, Any]] = []  # (what runs on, and writes to the program's tensors; its process group)


def gave_up(work: Any, group: Any) -> None:
    """A verdict ends the wait for ``work``, which may go on."""
    if not _given_up:
        atexit.register(_keep_what_runs)
    _given_up.append((work, group))


def _keep_what_runs() -> None:
    """Keep what was given up and still runs beyond the interpreter's own end, which would wait for it."""
    for kept in [kept for kept in _given_up if not kept[0].is_completed()]:
        ctypes.pythonapi.Py_IncRef(ctypes.c_void_p(id(kept)))


def printed_once(error: DdpstatsError, agreement: FailureAgreement, ranks: Sequence[int]) -> None:
    """From now on ``error``, which all of ``ranks`` raise, is printed by one of them."""
    global _hooked
    _verdicts.clear()  # a program that catches them may see many, and each keeps its frames
    _verdicts[id(error)] = error, agreement, ranks
    _raised_at[id(error)] = time.monotonic()
    if sys.excepthook is not _excepthook:
        _hooked, sys.excepthook = sys.excepthook, _excepthook


def excepthook_of_program() -> Callable[..., Any]:
    """Python's own, where the program has set none."""
    return _hooked or sys.__excepthook__ if sys.excepthook is _excepthook else sys.excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    show = _hooked or sys.__excepthook__
    if not tell(error, lambda: show(kind, error, strip(error))):
        show(kind, error, trace)


def tell(error: BaseException, show: Show) -> bool:
    """Print a verdict by ``show``, or one line that says which rank does; False for what is no verdict."""
    known = _verdicts.get(id(error))
    if known is None:
        return False
    if id(error) in _told:
        return True
    _told.add(id(error))
    _, agreement, ranks = known
    with signal_deferred():
        first = _elect_teller(agreement, ranks)
        if first == agreement.rank:
            show()
            _leave_for_torchrun(in_short(error, first), _happened_at(error), error)
        else:
            line = f"rank {agreement.rank}: {type(error).__name__}, the one that rank {first} prints in full"
            print(line, file=sys.stderr)
            _leave_for_torchrun(line, time.time(), error)
        sys.stderr.flush()
        _leave_after(first, agreement, ranks)
    return True


def _elect_teller(agreement: FailureAgreement, ranks: Sequence[int]) -> int:
    """Return which rank prints the last verdict: the first of those that it concerns that is alive and comes to print.

    Waits for those before this one, and for the teller to have told, but never for long. Without the store each rank
    is on its own.
    """
    me, store, number = agreement.rank, agreement.store, agreement.verdicts
    if agreement.is_lost:
        return me
    before = [rank for rank in ranks if rank < me]
    started = time.monotonic()
    try:
        wait_until(lambda: agreement.are_dead(before) or store.check([f"teller/{number}"]), _TELLING_SEC)
        first = int(store.post(f"teller/{number}", str(me)))
        if first != me:
            left_sec = _TELLING_SEC + _LINGER_SEC - (time.monotonic() - started)
            wait_until(lambda: agreement.are_dead([first]) or store.check([f"told/{number}"]), left_sec)
        return first
    except STORE_ERRORS:
        return me


def _leave_after(first: int, agreement: FailureAgreement, ranks: Sequence[int]) -> None:
    """After printing. The teller leaves last where it serves the store, and first where torchrun watches: what it
    wrote then stands in torchrun's summary. Never waits for long."""
    me, store, number = agreement.rank, agreement.store, agreement.verdicts
    if agreement.is_lost:
        return
    try:
        store.set(f"heard/{number}/{me}", "1")
        if first == me:
            store.set(f"told/{number}", "1")
            wait_until(lambda: _have_heard(ranks, agreement), _LINGER_SEC)
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            wait_until(lambda: agreement.are_dead([first]), _LINGER_SEC)
    except STORE_ERRORS:
        return


def _have_heard(ranks: Sequence[int], agreement: FailureAgreement) -> bool:
    """Return whether all of these that are alive have come to know of the verdict."""
    heard = f"heard/{agreement.verdicts}"
    return agreement.are_dead([rank for rank in ranks if not agreement.store.check([f"{heard}/{rank}"])])


def end_with(status: int) -> None:
    """See that the process ends with ``status``, when all exit handlers have run and all modules are gone."""
    sys.__dict__["_ddpstats_status"] = _LastOfAll(status)


class _LastOfAll:
    """The interpreter empties `sys` after all other modules but `builtins`."""

    def __init__(self, status: int) -> None:
        self._status, self._exit = status, os._exit

    def __del__(self) -> None:
        self._exit(self._status)


def _happened_at(error: BaseException) -> float:
    """When the collectives that differ were called: torchrun shows last what happened first.

    It counts whole seconds, and within one it takes the lowest rank for the first, which gloo may have aborted.
    """
    return min((e.started for e in getattr(error, "by_rank", {}).values() if e.started), default=time.time()) - 1


def _leave_for_torchrun(text: str, happened_at: float, error: BaseException) -> None:
    """As torch's own ``record`` does. What a program's ``record`` has written stays, unless it is all of ``error``."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.exists(path) and not _holds(path, str(error))):
        return
    told = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(happened_at)), _MARK: True}}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": told}, file)


def _holds(path: str, text: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return json.dumps(text)[1:-1] in file.read()
    except (OSError, ValueError):
        return False


def was_told(error_file: str) -> bool:
    """Return whether what torchrun found to have happened first is a verdict that a rank has printed."""
    try:
        with open(error_file, encoding="utf-8") as file:
            return bool(parse_json(file.read())["message"]["extraInfo"].get(_MARK))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # no rank failed, or it wrote other things
        return False


def in_short(error: BaseException, first: int) -> str:
    """Return one line, and where the rest is. ``first``: the rank that prints it."""
    return f"{calls_in_short(error)} The output of rank {first} has it in full."


def calls_in_short(error: BaseException, where: str = "") -> str:
    """Return one line of the message: what each rank did and where, and what differs. ``where`` it was raised."""
    lines = str(error).splitlines()
    did = [line for line in lines if line.startswith(("  rank", "      at "))] or lines[:1]
    calls = "".join(f"{'; ' if line.startswith('  rank') else ' '}{line.strip()}" for line in did).lstrip("; ")
    differs = "".join(f" {line}" for line in lines if line.startswith("What differs"))
    return f"{type(error).__name__}{where}: {calls.rstrip('.')}.{differs}"


def spelled(error: BaseException) -> str:
    """As Python ends a traceback."""
    return "".join(traceback.format_exception_only(type(error), error)).rstrip()


def strip(error: BaseException | None) -> TracebackType | None:
    """Take the frames of the guard out of the traceback of ``error``, and of what led to it; its new traceback."""
    seen: set[int] = set()
    first = error
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _without_ours(error.__traceback__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None if first is None else first.__traceback__


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OWN):
            kept.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for entry in reversed(kept):
        found = TracebackType(found, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return found


# -- SIGTERM ----------------------------------------------------------------------------------------------------------


class _Sigterm:
    """Its handler is there while ranks come to a verdict, and from then on: a verdict that is not told yet is told."""

    def __init__(self) -> None:
        self.depth, self.came, self.installed = 0, False, False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if self.depth == 0:
            self.end()

    def end(self) -> None:
        self.depth += 1
        for error, _, _ in list(_verdicts.values()):
            if time.monotonic() < _raised_at[id(error)] + _STILL_NEWS_SEC:
                tell(error, functools.partial(print, spelled(error), file=sys.stderr))
        sys.stdout.flush()
        sys.stderr.flush()
        if _told:
            os._exit(1)  # which it was about to end with
        self.restore()
        os.kill(os.getpid(), signal.SIGTERM)

    def install(self) -> bool:
        """False where the program has a handler of its own, or this is not its main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self.installed and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self.handle)
            self.installed = True
        return self.installed

    def restore(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self.handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.installed = False


_sigterm = _Sigterm()


def ignore_sigterm() -> None:
    """The process has told why it ends, and is as good as gone: let its own status stand, not torchrun's signal."""
    if _sigterm.install():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextlib.contextmanager
def signal_deferred() -> Iterator[None]:
    """Let SIGTERM wait until what is inside is done, where it would end the process. For the main thread alone."""
    if not _sigterm.install():
        yield
        return
    _sigterm.depth += 1
    try:
        yield
    finally:
        _sigterm.depth -= 1
        if _sigterm.depth == 0 and _sigterm.came:
            _sigterm.end()
        elif _sigterm.depth == 0 and not _verdicts:
            _sigterm.restore()
