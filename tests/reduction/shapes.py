"""Containers of a user's program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Scores:
    loss: Any
    extra: Any = None
