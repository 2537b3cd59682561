"""How long a part of a step takes: on the host, and on the device where CUDA is in use.

Events are recorded on the current stream and read later, when they have passed: at the flush at the latest. CUDA is not
initialised for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch


class Stopwatch:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._stream = _current_stream()
        self._start_event: Any = None if self._stream is None else _recorded_event(self._stream)
        self._end_event: Any = None
        self._started = time.perf_counter()
        self._host_sec = 0.0

    def stop(self) -> None:
        """The end."""
        self._host_sec = time.perf_counter() - self._started
        if self._stream is not None and _current_stream() is not None:
            self._end_event = _recorded_event(self._stream)

    @property
    def on_device(self) -> bool:
        """Whether a device was asked as well."""
        return self._end_event is not None

    def has_passed(self) -> bool:
        """Whether the device has come to the end."""
        return bool(self._end_event.query())

    def seconds(self) -> float:
        """The longer of the two; waits for the device, where there is one."""
        if self._end_event is None:
            return self._host_sec
        self._end_event.synchronize()
        on_device_sec: float = self._start_event.elapsed_time(self._end_event) / 1000
        return max(self._host_sec, on_device_sec)


class DeviceTimes:
    """Those that a device has yet to come to, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Stopwatch]] = deque()

    def append(self, name: str, watch: Stopwatch) -> None:
        self._waiting.append((name, watch))

    def finished(self, *, wait: bool = False) -> Iterator[tuple[str, float]]:
        """Those of them that it has come to by now; ``wait``: all of them. They are dropped here."""
        while self._waiting and (wait or self._waiting[0][1].has_passed()):
            name, watch = self._waiting.popleft()
            yield name, watch.seconds()


def _current_stream() -> Any:
    """None where CUDA is not in use, or a graph is captured."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_stream()


def _recorded_event(stream: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
