"""A guard that nobody wrote into the program, and its end: compare what is left, say so, and end with status 1.

Such a guard (``ddpstats run``, or ``DDPSTATS_GUARD=step torchrun train.py`` where the program imports ddpstats) lasts
as long as the process. A program that never imports ddpstats is not guarded by the variable, and nothing of ours runs
that could say so. The last comparison comes

1. before the default process group is destroyed: ``destroy_process_group`` asks each group to shut down, and a name for
   that was put in the place of ``ProcessGroup.shutdown``, which holds however the program imported the function;
2. else when the interpreter ends, after the program's threads, in an `atexit` handler.

What is found at 1 is raised. What is found at 2, or was raised at 1 and caught, is printed, and the process ends with
status 1 where it would have ended with 0. So it does where a helper thread got the error, and no code of the program
has caught it: the thread has died of it, or it lies in a future whose ``result()`` nobody has asked for.

An exit handler cannot change the status by raising, and must not end the process: others, such as those that end the
workers of a DataLoader, may come after it. So an object among the last that the interpreter takes apart ends the
process, when all else is done and written.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from ddpstats._base import config
from ddpstats._observe.frames import plan_of
from ddpstats.errors import DdpstatsError
from ddpstats.guard.telling import end_with, ignore_sigterm, spelled, tell

if TYPE_CHECKING:
    from ddpstats.guard.guard import collective_guard

AFTER_ERROR_SEC = 5.0  # how long the ranks of a program that has failed here are waited for

# -- 1. before the process group is destroyed -------------------------------------------------------------------------

AtDestroy = Callable[[Any], None]
_at_destroy: AtDestroy | None = None
_original_shutdown: Any = None
_destroyed = False  # whether a process group was, while somebody asked


def before_destroying(ask: AtDestroy | None) -> None:
    """Call ``ask`` with each process group that is about to be shut down; None restores everything."""
    global _at_destroy, _original_shutdown
    _at_destroy = ask
    if ask is not None and _original_shutdown is None:
        _original_shutdown = vars(dist.ProcessGroup).get("shutdown")
        if _original_shutdown is not None:
            dist.ProcessGroup.shutdown = _shutdown  # type: ignore[method-assign]
    elif ask is None and _original_shutdown is not None:
        dist.ProcessGroup.shutdown = _original_shutdown  # type: ignore[method-assign]
        _original_shutdown = None


def _shutdown(self: Any) -> None:
    global _destroyed
    _destroyed, original = True, _original_shutdown
    if _at_destroy is not None:
        _at_destroy(self)
    original.__get__(self)()


def had_ranks() -> bool:
    """Whether this process has, or had, a process group, or was started to be one of several ranks."""
    if dist.is_initialized() or _destroyed:
        return True
    size = os.environ.get("WORLD_SIZE", "")
    is_worker = multiprocessing.parent_process() is not None  # of a DataLoader, say
    return "RANK" in os.environ and size.isdecimal() and int(size) > 1 and not is_worker


# -- 2. when the interpreter ends -------------------------------------------------------------------------------------


class Ending:
    """Of this process. ``error``: what the program ended with, where `sys.excepthook` is not asked."""

    def __init__(self, guard: collective_guard, say: Callable[[], None]) -> None:
        self.guard, self._say, self._process = guard, say, os.getpid()
        self.error: BaseException | None = None
        self.status = 0  # what the program asked for

    def begin(self) -> None:
        self.guard.__enter__()
        atexit.register(self._end)

    def cancel(self) -> None:
        """This is no program to guard. Idempotent."""
        atexit.unregister(self._end)
        self.guard.abandon()

    def _end(self) -> None:
        if os.getpid() != self._process:
            return  # a fork of the program
        error = self.error or getattr(sys, "last_value", None)
        found = self.guard.verdict_at_end(error)
        if found is None and error is None and self.guard.raised_in_helper_thread and _is_unseen(self.guard.verdict):
            found = self.guard.verdict
        if found is not None:
            tell(found, lambda: print(spelled(found), file=sys.stderr))
            ignore_sigterm()
            if error is None and self.status == 0:
                end_with(1)
        with contextlib.suppress(DdpstatsError):
            self.guard.abandon(error)
        self._say()


def _is_unseen(error: BaseException | None) -> bool:
    """Whether no code of the program has caught it. A traceback begins with the frame that caught the error last: that
    is one of Python's own where a thread has died of it, or a pool of threads has put it into a future."""
    trace = error.__traceback__ if error is not None else None
    return trace is not None and plan_of(trace.tb_frame).internal


_CODE: Any = vars(SystemExit)["code"]


def remember_status(ending: Ending) -> None:
    """Notice the status that the program asks for by ``sys.exit``: nobody else is told of it before it is too late."""

    class Exit(SystemExit):
        """`SystemExit`. Asked for its code by the interpreter itself, and not by a frame, it is the program's end."""

        @property
        def code(self) -> Any:
            code = _CODE.__get__(self)
            if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
                ending.status = int(code is not None and code != 0)
            return code

        @code.setter
        def code(self, value: Any) -> None:
            _CODE.__set__(self, value)

        def __reduce__(self) -> tuple[Any, ...]:
            return SystemExit, self.args  # in another process it is nobody's program's end

    def exit(status: Any = None, /) -> NoReturn:
        raise Exit(*(status if isinstance(status, tuple) else () if status is None else (status,)))

    Exit.__name__ = Exit.__qualname__ = "SystemExit"
    sys.exit = exit


# -- DDPSTATS_GUARD ---------------------------------------------------------------------------------------------------

_of_environment: Ending | None = None


def start() -> None:
    """Begin once, as DDPSTATS_GUARD and DDPSTATS_RECORD_DIR say. Raises ``ConfigError`` for what makes no sense."""
    from ddpstats.guard.guard import collective_guard  # which asks this module to tell it of its end

    global _of_environment
    mode = config.guard_mode()
    if mode == "off" or config.is_disabled() or _of_environment is not None:
        return
    guard = collective_guard(mode, record_dir=config.record_dir()).preemptible()

    def say() -> None:
        if guard.has_begun or had_ranks():  # else a helper of the program's, or no distributed program at all
            guard.say_end()

    _of_environment = Ending(guard, say)
    _of_environment.begin()
    remember_status(_of_environment)


def found() -> DdpstatsError | None:
    """What the guard of DDPSTATS_GUARD has found in a program that comes to its end now, also if that has caught it."""
    guard = None if _of_environment is None else _of_environment.guard
    return None if guard is None else guard.verdict_at_end(None) or guard.verdict


def cancel() -> None:
    """For our own commands, which are no programs to guard. Idempotent."""
    if _of_environment is not None:
        _of_environment.cancel()
