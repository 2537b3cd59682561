"""``DDPSTATS_GUARD=step torchrun train.py``: the guard for a program that imports ddpstats, without a line of code.

It begins when ddpstats is imported and lasts as long as the process; `_ending` has how it ends. A program that never
imports ddpstats is not guarded, and nothing of ours runs that could say so: ``ddpstats run`` guards any program.
"""

from __future__ import annotations

from ddpstats._base import config
from ddpstats.guard._ending import Ending, had_ranks, remember_status
from ddpstats.guard._guard import collective_guard

_ending: Ending | None = None


def start() -> None:
    """Begin as DDPSTATS_GUARD and DDPSTATS_RECORD_DIR say. Raises ``ConfigError`` for values that make no sense."""
    global _ending
    mode = config.guard_mode()
    if mode == "off" or config.disabled():
        return
    guard = collective_guard(mode, record_dir=config.record_dir()).preemptible()

    def say() -> None:
        if guard.has_begun or had_ranks():  # else a helper of the program's, or no distributed program at all
            guard.say_end()

    _ending = Ending(guard, say)
    _ending.begin()
    remember_status(_ending)


def cancel() -> None:
    """For our own commands, which are no programs to guard. Idempotent."""
    if _ending is not None:
        _ending.cancel()
