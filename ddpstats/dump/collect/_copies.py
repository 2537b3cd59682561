"""How much memory of each device is taken by copies that are not measured yet."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

_MOST_BYTES = 256 << 20


class CopiesInFlight:
    """A copy is in flight until its event has happened; to ask an event waits for nothing."""

    def __init__(self) -> None:
        self._copies: dict[torch.device, deque[tuple[Any, int]]] = {}
        self._bytes: dict[torch.device, int] = {}

    def may_add(self, size: int, device: torch.device) -> bool:
        """Whether one more of this size stays within the limit."""
        copies = self._copies.get(device, ())
        while copies and copies[0][0].query():
            self._bytes[device] -= copies.popleft()[1]
        return self._bytes.get(device, 0) + size <= _MOST_BYTES

    def add(self, size: int, device: torch.device, event: Any) -> None:
        """``event`` happens when the copy is no longer needed."""
        self._copies.setdefault(device, deque()).append((event, size))
        self._bytes[device] = self._bytes.get(device, 0) + size
