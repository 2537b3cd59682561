"""Rows of a comparison: one per tensor or plain value of the entries that two dumps have under one NAME."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddpstats.dump.compare._rules import Closeness, Color, Difference
from ddpstats.dump.format._entries import STATISTICS, DumpLeaf

Mode = Literal["statistics", "md5", "tensor"]
MODES: tuple[Mode, ...] = ("tensor", "md5", "statistics")  # the one that says most first

WARNING, DIFFERENT, PASS, YES, NO, NOT_COMPARED = "Warning", "Different", "Pass", "Yes", "No", "N/A"
FAILED = frozenset({WARNING, DIFFERENT, NO, NOT_COMPARED})

_ROLES: dict[str, Literal["input", "parameter", "output"]] = {
    "input": "input",
    "input_kwargs": "input",
    "parameters": "parameter",
    "output": "output",
}

_NO_DIFFERENCES: tuple[Difference, ...] = ((None, None),) * len(STATISTICS)


@dataclass(slots=True)
class Row:
    """Two tensors of one name, or the one that is there.

    Attributes:
        index: of the entry, in the order in which its dump has them.
        entry: its NAME.
        path: of the tensor in it; empty for an entry without tensors.
        a: the leaf in A; None where A has none.
        b: the leaf in B.
        differences: of Max, Min, Mean, Norm: a - b, and relative to b.
        closeness: of the tensors' elements, in tensor mode.
        result: ``Warning``, ``Different``, ``No`` or ``N/A`` for what is not well; else ``Pass``, ``Yes`` or empty.
        message: why, where that needs words.
        unequal: whether anything that was compared differs at all.
        color: how the row is highlighted, and `reason` why.
        only: the side that has this entry, where the other has not.
        by_statistics: whether, in tensor mode, only statistics were compared: neither side saved the tensor.
        place: among the rows of its entry.
    """

    index: int
    entry: str
    path: str
    a: DumpLeaf | None
    b: DumpLeaf | None
    differences: tuple[Difference, ...] = _NO_DIFFERENCES
    closeness: Closeness | None = None
    result: str = ""
    message: str = ""
    unequal: bool = False
    color: Color | None = None
    reason: str = ""
    only: Literal["A", "B", ""] = ""
    by_statistics: bool = False
    place: int = 0

    @property
    def name(self) -> str:
        return f"{self.entry}.{self.path}" if self.path else self.entry

    @property
    def failed(self) -> bool:
        return self.result in FAILED

    @property
    def order(self) -> tuple[int, bool, int]:
        """Execution order: A's; what only B has stands behind what A has at that place."""
        return self.index, self.only == "B", self.place

    @property
    def role(self) -> Literal["input", "parameter", "output", ""]:
        """What the tensor was to its call."""
        return _ROLES.get(self.path.split(".", 1)[0], "")

    @property
    def requires_grad_consistent(self) -> bool | None:
        if self.a is None or self.b is None or self.a.requires_grad is None or self.b.requires_grad is None:
            return None
        return self.a.requires_grad == self.b.requires_grad
