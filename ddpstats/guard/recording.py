"""When the record of a guard begins: as soon as it is known whose it is, which may be before the first collective.

A program may issue no collective at all but our own reductions, which tell of themselves, as capture and the sentinel
do, by marks. What they tell before there is a process group waits here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from ddpstats._base import marks
from ddpstats._base.marks import Mark
from ddpstats._ranks.store import GLANCE_SEC, STORE_ERRORS
from ddpstats.errors import DdpstatsError
from ddpstats.guard.group import run_name
from ddpstats.guard.record import RecordWriter

_MOST_EARLY_MARKS = 1000
_TRIES = 3  # at a store that does not answer at once

log = logging.getLogger("ddpstats")


class Recording:
    """Of one guard. ``writer`` is None before it begins, and where no ``directory`` is given."""

    def __init__(self, directory: str | Path | None) -> None:
        self._directory = directory
        self.writer: RecordWriter | None = None
        self._early: deque[Mark] = deque(maxlen=_MOST_EARLY_MARKS)
        self._tries = _TRIES
        self._turn = threading.RLock()  # a mark may come from another thread than the first collective

    def subscribe(self) -> None:
        """Take from now on what other parts tell."""
        if self._directory is not None:
            marks.listeners.append(self._take)

    def stop_listening(self) -> None:
        """Idempotent."""
        with suppress(ValueError):
            marks.listeners.remove(self._take)

    def _take(self, mark: Mark) -> None:
        with self._turn:
            self.begin_early()
            if self.writer is None:
                self._early.append(mark)
            else:
                self.writer.write_mark(mark)

    def begin(self, run: str) -> None:
        """Unless it has begun. Raises `ConfigError` where nothing can be written."""
        with self._turn:
            if self._directory is None or self.writer is not None:
                return
            self.writer = RecordWriter(self._directory, dist.get_rank(), dist.get_world_size(), run)
            while self._early:
                self.writer.write_mark(self._early.popleft())

    def begin_early(self) -> None:
        """`begin` before the guard has connected: where the ranks are known, and the store answers. Raises nothing."""
        if self._directory is None or self.writer is not None or not self._tries or not dist.is_initialized():
            return
        try:
            self.begin(run_name(GLANCE_SEC))
        except (DdpstatsError, *STORE_ERRORS) as error:
            self._tries -= 1
            if not self._tries:
                log.warning("no record is written before the first collective: %s", error)

    def close(self) -> None:
        """Local and idempotent."""
        self.stop_listening()
        if self.writer is not None:
            self.writer.close()
