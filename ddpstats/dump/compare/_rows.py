"""Rows of a comparison: one per tensor or plain value of the entries that two dumps have under one NAME.

As a table they have the known tool's columns, in which A is its "NPU" and B its "Bench".
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from ddpstats._base.report import harmless
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


# -- as a table --------------------------------------------------------------------------------------------------------

_IDENTITY = [
    f"{side} {what}" for what in ("Name", "Dtype", "Tensor Shape", "Requires_grad") for side in ("NPU", "Bench")
]
_RAW = [f"{side} {what}" for side in ("NPU", "Bench") for what in ("max", "min", "mean", "l2norm")]
_MIDDLE = {
    "statistics": [
        *("Max diff", "Min diff", "Mean diff", "L2norm diff"),
        *("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr"),
    ],
    "md5": ["NPU MD5", "BENCH MD5"],
    "tensor": [
        *("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr"),
        *("One Thousandth Err Ratio", "Five Thousandths Err Ratio"),
    ],
}
_VERDICT = {"statistics": "Result", "md5": "Result", "tensor": "Accurate or Not"}

Stacks = Callable[[str], Sequence[str]]


def columns(mode: Mode) -> list[str]:
    raw = [] if mode == "md5" else _RAW
    return [
        *(*_IDENTITY, *_MIDDLE[mode], *raw),
        *("Requires_grad Consistent", _VERDICT[mode], "Err_message", "NPU_Stack_Info"),
    ]


def cells(row: Row, mode: Mode, stack: Sequence[str]) -> list[Any]:
    """A row's values in the order of `columns`; ``N/A`` where there is nothing."""
    sides = (row.a, row.b)
    missing = _absent_sides(row)
    names = ["N/A" if absent else row.name for absent in missing]
    dtypes = ["N/A" if leaf is None else leaf.dtype for leaf in sides]
    shapes = ["N/A" if leaf is None else str(list(leaf.shape)) for leaf in sides]
    wants = ["N/A" if leaf is None or leaf.requires_grad is None else str(leaf.requires_grad) for leaf in sides]
    raw = [] if mode == "md5" else [_given(leaf, key) for leaf in sides for key in STATISTICS]
    consistent = row.requires_grad_consistent
    return [
        *(*names, *dtypes, *shapes, *wants, *_middle(row, mode), *raw),
        *("N/A" if consistent is None else str(consistent), row.result, row.message, "\n".join(stack) or "N/A"),
    ]


def _absent_sides(row: Row) -> tuple[bool, bool]:
    if row.only:
        return row.only == "B", row.only == "A"
    return row.a is None and row.b is not None, row.b is None and row.a is not None


def _middle(row: Row, mode: Mode) -> list[Any]:
    if mode == "md5":
        return ["N/A" if leaf is None or leaf.md5 is None else leaf.md5 for leaf in (row.a, row.b)]
    if mode == "statistics":
        return [
            *("N/A" if pair[0] is None else pair[0] for pair in row.differences),
            *("N/A" if pair[1] is None else percent(pair[1]) for pair in row.differences),
        ]
    close = row.closeness
    if close is None:
        return ["N/A"] * 6
    return [
        *(close.cosine, close.euclidean, close.max_abs, close.max_relative),
        *(close.one_thousandth, close.five_thousandths),
    ]


def _given(leaf: DumpLeaf | None, key: str) -> Any:
    """A statistic as the dump has it; of a plain value, that."""
    given = None if leaf is None else leaf.raw.get(key) if leaf.is_tensor else leaf.value
    return "N/A" if given is None else given


def percent(ratio: float) -> str:
    return f"{ratio * 100:.6g}%" if math.isfinite(ratio) else str(ratio)


class Table:
    """A CSV file that rows are added to as they come; its cells cannot begin a formula in a spreadsheet program."""

    def __init__(self, file: TextIO, mode: Mode, stacks: Stacks) -> None:
        self._writer = csv.writer(file)
        self._mode = mode
        self._stacks = stacks
        self._writer.writerow(columns(mode))

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._writer.writerow([harmless(cell) for cell in cells(row, self._mode, self._stacks(row.entry))])


def table_path(path: Path, rank: int, many: bool) -> Path:
    """One file per rank, where there are several: ``result.csv`` becomes ``result_rank3.csv``."""
    return path.with_name(f"{path.stem}_rank{rank}{path.suffix}") if many else path


def as_dict(row: Row, stack: Sequence[str], parent: object) -> dict[str, Any]:
    """A row for JSON."""
    close = row.closeness
    return {
        "name": row.name, "entry": row.entry, "path": row.path, "index": row.index, "result": row.result,
        "message": row.message, "unequal": row.unequal, "color": row.color, "reason": row.reason,
        "differences": {key: pair[0] for key, pair in zip(STATISTICS, row.differences, strict=True)},
        "relative_errors": {key: pair[1] for key, pair in zip(STATISTICS, row.differences, strict=True)},
        "a": _leaf(row.a),
        "b": _leaf(row.b),
        "closeness": None if close is None else {
            "cosine": close.cosine, "euclidean": close.euclidean, "max_abs": close.max_abs,
            "max_relative": close.max_relative, "one_thousandth": close.one_thousandth,
            "five_thousandths": close.five_thousandths,
            "runs": runs_dict(close.runs),
        },
        "stack": list(stack),
        "parent": parent,
    }  # fmt: skip


def runs_dict(runs: Any) -> dict[str, Any]:
    first = [list(run) for run in runs.first[:100]]
    return {
        "elements": runs.elements,
        "differing": runs.differing,
        "count": runs.count,
        "largest": runs.largest,
        "item_bytes": runs.item_bytes,
        "flipped_bits": runs.flipped_bits,
        "first": first,
        "words": runs.describe(),
    }


def _leaf(leaf: DumpLeaf | None) -> Mapping[str, Any] | None:
    return None if leaf is None else leaf.raw
