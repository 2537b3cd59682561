"""Containers of a user's program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Scores:
    loss: Any
    extra: Any = None


@dataclass(frozen=True)
class Checked:
    """A constructor that would refuse what a reduction returns."""

    value: Any
    doubled: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.value, int):
            raise TypeError("only integers")
