"""Counts the threads of a process, without those that are about to end by themselves."""

from __future__ import annotations

import threading
import time


def lasting_threads() -> int:
    """The thread of a store's connection stays for a moment after each request: it has 20 s to be gone."""
    deadline = time.monotonic() + 20
    while any(thread.name == "ddpstats-store" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.active_count()
