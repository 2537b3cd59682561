"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import sys
import time

_WIDTH = 30
_EVERY_SEC = 0.2


class ProgressBar:
    """Counts bytes. Use it in a ``with``: it wipes itself away at the end."""

    def __init__(self, total_bytes: int) -> None:
        self._total = max(1, total_bytes)
        self._done = 0
        self._began = time.monotonic()
        self._shown = self._began
        self._visible = sys.stderr.isatty()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._visible:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def add(self, size_bytes: int) -> None:
        self._done += size_bytes
        now = time.monotonic()
        if not self._visible or now - self._shown < _EVERY_SEC:
            return
        self._shown = now
        share = min(1.0, self._done / self._total)
        rate = self._done / 1e6 / max(1e-9, now - self._began)
        left = (self._total - self._done) / 1e6 / max(rate, 1e-9)
        bar = "#" * int(share * _WIDTH)
        sys.stderr.write(f"\r[{bar:{_WIDTH}}] {share:4.0%}  {rate:,.0f} MB/s  {max(0.0, left):,.0f} s left \x1b[K")
        sys.stderr.flush()
