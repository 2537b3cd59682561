"""What a guard prints: an error that all ranks raise, once and not once per rank, and the line that it ends with.

The verdict names the rank that prints it whole (`diagnosis.GuardFinding`). Every other rank prints one line: the calls,
what differs, and which rank has the rest. So nothing that matters is lost where that rank is killed meanwhile. All
write the same line where torchrun looks (``TORCHELASTIC_ERROR_FILE``), with the time at which it happened. The others
print theirs when the rank that prints has ended, or a moment later: lines of several ranks do not mix.

A rank that fails makes torchrun end the others by SIGTERM, within a tenth of a second. So SIGTERM waits while ranks
come to a verdict (`defer_sigterm`). One that comes after the verdict prints it if nothing has printed it yet, also
where the program has caught it, and ends the process with status 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from ddpstats._base.text import count_of
from ddpstats.errors import DdpstatsError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = tuple(os.path.join(_PACKAGE, part) for part in ("guard/", "_observe/collectives.py", "_ranks/gloo.py"))
_PRINTER_SEC = 2.0  # for the rank that prints the verdict whole, before another rank prints and ends


# -- an error that all ranks raise ------------------------------------------------------------------------------------


@dataclass
class _VerdictToPrint:
    """``has_printer_ended``: False where that is not known, as of a rank of another host."""

    error: DdpstatsError
    rank: int
    printer: int
    has_printer_ended: Callable[[], bool]
    is_printed: bool = False
    is_early: bool = False  # printed before the program has raised it: without its traceback, and first of all ranks
    lock: Any = field(default_factory=threading.RLock)  # of the thread that prints; the others wait until it has


_newest: _VerdictToPrint | None = None
_original_hook: Callable[..., Any] | None = None


def print_once(error: DdpstatsError, rank: int, printer: int, has_printer_ended: Callable[[], bool]) -> None:
    """From now on ``error``, which this ``rank`` is about to raise, is printed whole by rank ``printer`` alone."""
    global _newest, _original_hook
    _newest = _VerdictToPrint(error, rank, printer, has_printer_ended)
    if _original_hook is None:  # once: a process group that is made later wraps the hook that it finds
        _original_hook, sys.excepthook = sys.excepthook, _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    hook = _original_hook or sys.__excepthook__
    if not print_verdict(error, lambda: hook(kind, error, strip(error))):
        hook(kind, error, trace)
    elif _newest is not None and _newest.is_early and _newest.rank == _newest.printer:
        hook(kind, kind("the message is above"), strip(error))


def print_verdict(error: BaseException, show: Callable[[], object], is_early: bool = False) -> bool:
    """Print the newest verdict, unless it is printed: whole, by ``show``, or in one line. False for another error."""
    verdict = _newest
    if verdict is None or verdict.error is not error:
        return False
    with verdict.lock:
        if not verdict.is_printed:
            verdict.is_printed, verdict.is_early = True, is_early
            _print(verdict, show)
    return True


def _print(verdict: _VerdictToPrint, show: Callable[[], object]) -> None:
    is_printer = verdict.rank == verdict.printer
    line = f"{in_short(verdict.error)} The output of rank {verdict.printer} has it in full."
    with defer_sigterm():
        _leave_for_torchrun(line, verdict.error)
        deadline = time.monotonic() + (0.0 if verdict.is_early else _PRINTER_SEC)
        while not is_printer and not verdict.has_printer_ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        if is_printer:
            show()
        else:
            print(f"rank {verdict.rank}: {line}", file=sys.stderr)  # behind the other rank's text, unless it is early
        sys.stderr.flush()


def print_message(error: DdpstatsError, is_early: bool = False) -> None:
    """Print a verdict that Python does not print, as it ends a traceback. ``is_early``: it may raise it later."""
    print_verdict(error, lambda: traceback.print_exception(type(error), error, None, chain=False), is_early)


def in_short(error: DdpstatsError) -> str:
    """Return one line of the message: what each rank did and where, and what differs."""
    lines = str(error).splitlines()
    calls = [line for line in lines if line.startswith(("  rank", "      at "))] or lines[:1]
    text = "".join(f"{'; ' if line.startswith('  rank') else ' '}{line.strip()}" for line in calls).lstrip("; ")
    differences = "".join(f" {line}" for line in lines if line.startswith("What differs"))
    return f"{type(error).__name__}: {text.rstrip('.')}.{differences}"


def _leave_for_torchrun(text: str, error: BaseException) -> None:
    """Write what torchrun shows of this rank, as torch's own ``record`` does; it shows last what happened first.

    That is when the collectives that differ were called. It counts whole seconds, and within one it takes the lowest
    rank for the first, which gloo may have aborted.
    """
    happened_at = min((event.started for event in getattr(error, "by_rank", {}).values()), default=time.time()) - 1
    content = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(happened_at))}}
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": content}, file)


def strip(error: BaseException) -> TracebackType | None:
    """Take the frames of the guard out of the traceback of ``error``, and of what led to it; its new traceback."""
    for cause in errors_behind(error):
        cause.__traceback__ = _without_own_frames(cause.__traceback__)
    return error.__traceback__


def errors_behind(error: BaseException | None) -> list[BaseException]:
    """Return it, and what was being handled when it was raised: a program may catch torch's error and call sys.exit."""
    errors: list[BaseException] = []
    while error is not None and error not in errors:
        errors.append(error)
        error = error.__cause__ or error.__context__
    return errors


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    rest: TracebackType | None = None
    for entry in reversed(entries):
        if not entry.tb_frame.f_code.co_filename.startswith(_OWN):
            rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


def leave_running(work: Any, group: Any) -> None:
    """Keep a collective that was given up, and its process group, beyond the end of the interpreter.

    It may go on, and writes to the program's tensors. A group that is destroyed waits for all that runs in it, gloo's
    of torch 2.13 for as long as its timeout.
    """
    for kept in (work, group):
        ctypes.pythonapi.Py_IncRef(ctypes.c_void_p(id(kept)))


# -- SIGTERM ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def defer_sigterm() -> Iterator[None]:
    """Let SIGTERM wait until what is inside is done. Only in the main thread, and where it would end the process."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _end_with_verdict):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if _newest is None else _end_with_verdict)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)


def _end_with_verdict(number: int, frame: FrameType | None) -> None:
    """End with the status of an error, which the process is about to end with; print it before."""
    assert _newest is not None
    print_message(_newest.error)
    end_process(1)


def end_process(status: int) -> None:
    """End at once, without exit handlers, but for the children that these would end."""
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


# -- the line that a guard ends with ----------------------------------------------------------------------------------

RECORDED = "mode 'record' compares nothing while it runs; `ddpstats report DIR` does"
WITHOUT_OTHERS = "of groups of one rank"
UNSETTLED = "since the last comparison"
GIVEN_UP = "torch's own timeout ended a collective of that group"
MESSAGES_SEEN = "messages between ranks, which are checked as they begin or fail"
TO_RUN = "Start it on ranks: `ddpstats run --nproc 2 SCRIPT`, or `torchrun --nproc-per-node 2 SCRIPT`"
NO_GROUP = (
    "no process group was made in this process. If the program starts its ranks itself (mp.spawn), guard them with "
    f"DDPSTATS_GUARD=strict, where they import ddpstats. Otherwise s{TO_RUN[1:]}"
)


@dataclass(frozen=True)
class Tally:
    """``not_compared``: reason -> collectives. ``agreeing``: ranks that were seen to do the same."""

    compared: int = 0
    not_compared: Counter[str] = field(default_factory=Counter)
    agreeing: frozenset[int] = frozenset()

    def __add__(self, more: Tally) -> Tally:
        reasons = self.not_compared + more.not_compared
        return Tally(self.compared + more.compared, reasons, self.agreeing | more.agreeing)


@dataclass(frozen=True)
class GuardCounters:
    """One guard's counters, so far.

    Attributes:
        collectives: seen on this rank; messages count, too.
        compared: those that all ranks of their group are known to have issued.
        not_compared: all others.
        steps: calls of `collective_guard.step`.
        mode: of the guard.
        reasons: why -> how many were not compared.
        ranks_agreeing: how many ranks were seen to do the same, this one among them.
    """

    collectives: int
    compared: int
    not_compared: int
    steps: int
    mode: str = "off"
    reasons: Mapping[str, int] = field(default_factory=dict)
    ranks_agreeing: int = 0


def last_line(counters: GuardCounters, nothing: str, verdict: str) -> tuple[bool, str]:
    """Return whether something is wrong, and the line.

    ``nothing``: why there was nothing to compare, where that is known. ``verdict``: what was raised, in short.
    """
    seen = f"collective guard, mode {counters.mode}: {count_of(counters.collectives, 'collectives')} seen"
    reasons = "; ".join(f"{count:,}: {why}" for why, count in counters.reasons.items())
    if len(counters.reasons) == 1:
        (reasons,) = counters.reasons
    if counters.compared == 0 and not verdict:
        why = nothing or reasons or "the program itself issued none while the guard was on"
        is_right = why == MESSAGES_SEEN or (counters.mode == "record" and counters.collectives > 0)
        return not is_right, f"{seen}, nothing was compared: {why}."
    left = f"{counters.not_compared:,} not" + (f" ({reasons})" if reasons else "")
    end = f"its verdict was {verdict.rstrip('.')}" if verdict else f"{counters.ranks_agreeing} ranks agree"
    return False, f"{seen}, {counters.compared:,} compared, {left}; {end}."
