"""Rows of a comparison: one per tensor or plain value of the entries that two dumps have under one NAME.

Compared is what has the same path in both, if the entries have the same number of tensors and this one the same shape.
Everything else is a row without a comparison, ``N/A``, that says why. Plain arguments (an int, a bool, a string) are
compared where both dumps have them; a device's name is not, since two runs may well be on different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpstats.dump.compare._rules import (
    Closeness,
    Color,
    Difference,
    difference,
    is_over,
    statistics_color,
    tensor_color,
)
from ddpstats.dump.format._entries import STATISTICS, Entry, Leaf, number

Mode = Literal["statistics", "md5", "tensor"]
MODES: tuple[Mode, ...] = ("tensor", "md5", "statistics")  # the one that says most first

WARNING, DIFFERENT, PASS, YES, NO, NOT_COMPARED = "Warning", "Different", "Pass", "Yes", "No", "N/A"
FAILED = frozenset({WARNING, DIFFERENT, NO, NOT_COMPARED})

_NO_DIFFERENCES: tuple[Difference, ...] = ((None, None),) * len(STATISTICS)
_PLAIN = {"int", "float", "bool", "str", "complex"}
_COUNTS = ("nan_count", "inf_count")

CompareTensors = Callable[[Leaf, Leaf], Closeness]


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
    """

    index: int
    entry: str
    path: str
    a: Leaf | None
    b: Leaf | None
    differences: tuple[Difference, ...] = _NO_DIFFERENCES
    closeness: Closeness | None = None
    result: str = ""
    message: str = ""
    unequal: bool = False
    color: Color | None = None
    reason: str = ""
    only: Literal["A", "B", ""] = ""

    @property
    def name(self) -> str:
        return f"{self.entry}.{self.path}" if self.path else self.entry

    @property
    def failed(self) -> bool:
        return self.result in FAILED

    @property
    def order(self) -> tuple[int, bool]:
        """Execution order: A's; what only B has stands behind what A has at that place."""
        return self.index, self.only == "B"

    @property
    def requires_grad_consistent(self) -> bool | None:
        if self.a is None or self.b is None or self.a.requires_grad is None or self.b.requires_grad is None:
            return None
        return self.a.requires_grad == self.b.requires_grad


class EntryComparer:
    """Makes rows.

    Args:
        mode: what is compared.
        tolerance: a relative error above it is a ``Warning``, in statistics mode.
        tensors: compares two saved tensors, in tensor mode.
    """

    def __init__(self, mode: Mode, tolerance: float, tensors: CompareTensors | None = None) -> None:
        self.mode = mode
        self.tolerance = tolerance
        self._tensors = tensors

    def rows(self, index: int, a: Entry, b: Entry) -> list[Row]:
        """Of two entries of one NAME."""
        of_a, of_b = _compared(a), _compared(b)
        tensors_a, tensors_b = (sum(leaf.is_tensor for leaf in of.values()) for of in (of_a, of_b))
        counts = f"A has {tensors_a} tensors here, B {tensors_b}" if tensors_a != tensors_b else ""
        rows = []
        for path in of_a | of_b:
            leaf_a, leaf_b = of_a.get(path), of_b.get(path)
            if leaf_a is not None and leaf_b is not None and not counts:
                rows.append(self._row(Row(index, a.name, path, leaf_a, leaf_b), leaf_a, leaf_b))
            elif any(leaf is not None and leaf.is_tensor for leaf in (leaf_a, leaf_b)):
                why = counts or f"only {'A' if leaf_b is None else 'B'} has a tensor of this path"
                rows.append(Row(index, a.name, path, leaf_a, leaf_b, result=NOT_COMPARED, message=why, unequal=True))
        _highlight(rows, self.mode)
        return rows

    def alone(self, index: int, entry: Entry, side: Literal["A", "B"]) -> list[Row]:
        """Of an entry that one dump has."""
        why = f"only {side} has this entry"
        found: Sequence[tuple[str, Leaf | None]] = list(entry.leaves()) or [("", None)]
        rows = []
        for path, leaf in found:
            a, b = (leaf, None) if side == "A" else (None, leaf)
            rows.append(_not_compared(Row(index, entry.name, path, a, b, only=side), why))
        return rows

    def _row(self, row: Row, a: Leaf, b: Leaf) -> Row:
        if a.is_tensor != b.is_tensor:
            return _not_compared(row, f"A has a {a.type} here, B a {b.type}")
        if not a.is_tensor:
            return self._plain(row, a, b)
        if a.raw.get("shape") != b.raw.get("shape"):
            return _not_compared(row, f"the shape is {list(a.shape)} in A and {list(b.shape)} in B")
        _statistics(row, a.raw, b.raw)
        if a.raw.get("dtype") != b.raw.get("dtype"):
            row.message, row.unequal = f"the dtype is {a.dtype} in A and {b.dtype} in B", True
        if self.mode == "statistics":
            row.result = WARNING if is_over((pair[1] for pair in row.differences), self.tolerance) else ""
            return row
        return self._md5(row, a, b) if self.mode == "md5" else self._tensor(row, a, b)

    def _plain(self, row: Row, a: Leaf, b: Leaf) -> Row:
        row.unequal = a.value != b.value and not (a.value != a.value and b.value != b.value)
        if row.unequal:
            row.message = f"{a.value!r} in A and {b.value!r} in B"
        over = row.unequal
        if {a.type, b.type} <= {"float", "int"} and "float" in (a.type, b.type):
            row.differences = (_numbers(a.value, b.value),) * len(STATISTICS)
            over = is_over((row.differences[0][1],), self.tolerance)
        good, bad = {"statistics": ("", WARNING), "md5": (PASS, DIFFERENT), "tensor": (YES, NO)}[self.mode]
        row.result = bad if over else good
        return row

    def _md5(self, row: Row, a: Leaf, b: Leaf) -> Row:
        if a.md5 is None or b.md5 is None:
            return _not_compared(row, f"{'A' if a.md5 is None else 'B'} has no md5 for it")
        row.result = PASS if a.md5 == b.md5 else DIFFERENT
        return row

    def _tensor(self, row: Row, a: Leaf, b: Leaf) -> Row:
        if a.data_name is None or b.data_name is None or self._tensors is None:
            return _not_compared(row, f"{'A' if a.data_name is None else 'B'} has not saved this tensor")
        close = row.closeness = self._tensors(a, b)
        row.unequal = row.unequal or not close.equal
        row.result = YES if close.accurate else NO
        if not close.equal:
            row.message = "; ".join(filter(None, (row.message, close.runs.describe())))
        return row


def _compared(entry: Entry) -> dict[str, Leaf]:
    return {path: leaf for path, leaf in entry.values() if leaf.is_tensor or leaf.type in _PLAIN}


def _not_compared(row: Row, why: str) -> Row:
    row.result, row.message, row.unequal = NOT_COMPARED, why, True
    return row


def _numbers(a: Any, b: Any) -> Difference:
    try:
        return difference(number(a), number(b))
    except ValueError:
        return None, None


def _statistics(row: Row, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Fill in the differences, and whether anything differs at all."""
    row.differences = tuple(difference(number(a.get(key)), number(b.get(key))) for key in STATISTICS)
    row.unequal = any(pair[0] for pair in row.differences) or any(
        a[key] != b[key] for key in ("md5", *_COUNTS) if a.get(key) is not None and b.get(key) is not None
    )


def _highlight(rows: list[Row], mode: Mode) -> None:
    """Color the rows of one entry: what happens to an output depends on its inputs."""
    inputs = [row for row in rows if _role(row) == "input" and row.a is not None and row.b is not None]
    maxima = [pair for row in inputs if (pair := _maxima(row)) != (None, None)]
    close = [row.closeness for row in inputs if row.closeness is not None]
    for row in rows:
        if row.a is None or not row.a.is_tensor:
            continue
        found = statistics_color(_role(row), _maxima(row), row.a.min, [pair[0] for pair in row.differences], maxima)
        if mode == "tensor" and found is None and row.closeness is not None and _role(row) == "output":
            ratios, cosines = [one.one_thousandth for one in close], [one.cosine for one in close]
            found = tensor_color(row.closeness.one_thousandth, row.closeness.cosine, ratios, cosines)
        if found is None and row.requires_grad_consistent is False:
            found = "yellow", "requires_grad differs"
        if found is not None:
            row.color, row.reason = found


def _maxima(row: Row) -> tuple[float | None, float | None]:
    known = [leaf.max if leaf is not None and leaf.is_tensor else None for leaf in (row.a, row.b)]
    return known[0], known[1]


def _role(row: Row) -> Literal["input", "output", ""]:
    section = row.path.split(".", 1)[0]
    if section in ("input", "input_kwargs"):
        return "input"
    return "output" if section == "output" else ""
