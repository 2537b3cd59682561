"""``DDPSTATS_GUARD=step python train.py``: the guard for a program that imports ddpstats, without a line of code.

It begins when ddpstats is imported and lasts as long as the process. Leaving it at exit is local: by then the program
may have destroyed its process group, so there is no last comparison; `collective_guard` and ``ddpstats run`` have one.
"""

from __future__ import annotations

import atexit

from ddpstats import _config
from ddpstats.guard._guard import collective_guard


def start() -> None:
    """Begin as DDPSTATS_GUARD and DDPSTATS_RECORD_DIR say. Raises ``ConfigError`` for values that make no sense."""
    mode = _config.guard_mode()
    if mode == "off" or _config.disabled():
        return
    guard = collective_guard(mode, record_dir=_config.record_dir()).yielding()
    guard.__enter__()
    atexit.register(guard.abandon)
