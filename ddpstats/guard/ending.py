"""The end of a guard that no code of the program entered: the last comparison, its report, and the exit status.

``ddpstats run`` enters such a guard, and so does ``import ddpstats`` where DDPSTATS_GUARD is set. It lasts as long as
the process. The last comparison comes

1. before the default process group is destroyed (`group.call_before_destroy`): what it finds is raised;
2. otherwise when the interpreter ends, after the program's threads, in an `atexit` handler: what it finds, or was
   raised at 1 and caught, is printed, and the process ends with status 1 where it would have ended with 0. It ends
   at once: torchrun's SIGTERM may come at any time, and would be the status otherwise.

What was raised before, and caught by the program, is printed as well, and leaves the status to the program.

Exit handlers run last in, first out. This one is registered before the program has registered its own, so it runs when
these have run, and may end the process. Python reports the status of ``sys.exit`` to no handler: under ``ddpstats run``
the runner catches it; under DDPSTATS_GUARD a status that the program asked for becomes 1 as well.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable

from ddpstats._base import config
from ddpstats.errors import DdpstatsError
from ddpstats.guard.group import MODES, had_ranks
from ddpstats.guard.guard import collective_guard
from ddpstats.guard.printing import end_process, errors_behind, print_message


class Ending:
    """The end of this process under ``guard``. ``report``: print the last line.

    ``error`` is what the program ended with, where `sys.excepthook` is not called.
    """

    def __init__(self, guard: collective_guard, report: Callable[[], None]) -> None:
        self.guard, self._report, self._process = guard, report, os.getpid()
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Enter the guard, and compare when the interpreter ends."""
        self.guard.__enter__()
        self.guard._watching.state.ends_process = True
        atexit.register(self._end)

    def cancel(self) -> None:
        """Leave the guard: this process runs no program to guard. Idempotent."""
        atexit.unregister(self._end)
        self.guard.abandon()

    def _end(self) -> None:
        if os.getpid() != self._process:
            return  # a fork of the program
        error = self.error or getattr(sys, "last_value", None)
        verdict, status = self.guard.verdict_at_end(error), error.code if isinstance(error, SystemExit) else 1
        raised = verdict or self.guard.verdict
        if raised is not None and raised not in errors_behind(error):  # with which Python prints it
            print_message(raised)
        with contextlib.suppress(DdpstatsError):
            self.guard.abandon(error)
        self._report()
        if verdict is not None:
            logging.shutdown()
            end_process(status if isinstance(status, int) else 1)


# -- DDPSTATS_GUARD ---------------------------------------------------------------------------------------------------

_of_environment: Ending | None = None


def start() -> None:
    """Begin once, as DDPSTATS_GUARD and DDPSTATS_RECORD_DIR say. Raises ``ConfigError`` for what makes no sense."""
    global _of_environment
    mode = config.choice("DDPSTATS_GUARD", "off", MODES)
    if mode == "off" or config.is_disabled() or _of_environment is not None:
        return
    guard = collective_guard(mode, record_dir=os.environ.get("DDPSTATS_RECORD_DIR") or None)

    def report() -> None:
        if guard.has_begun or had_ranks():  # otherwise the process is a helper, or belongs to no distributed program
            guard.say_end()

    _of_environment = Ending(guard, report)
    _of_environment.begin()


def verdict() -> DdpstatsError | None:
    """Return the verdict of DDPSTATS_GUARD on a program that ends now, also one that the program has caught."""
    if _of_environment is None:
        return None
    guard = _of_environment.guard
    return guard.verdict_at_end(None) or guard.verdict


def cancel() -> None:
    """Leave the guard of DDPSTATS_GUARD: a command of ddpstats is no program to guard. Idempotent."""
    if _of_environment is not None:
        _of_environment.cancel()
