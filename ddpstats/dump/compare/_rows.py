"""Rows of a comparison: one per tensor or plain value of the entries that two dumps have under one NAME.

As a table they have the known tool's columns, in which A is its "NPU" and B its "Bench".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddpstats.dump.compare._rules import Closeness, Color, Difference
from ddpstats.dump.reader import STATISTICS, DumpLeaf

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


def columns(mode: Mode) -> list[str]:
    raw = [] if mode == "md5" else _RAW
    return [
        *(*_IDENTITY, *_MIDDLE[mode], *raw),
        *("Requires_grad Consistent", _VERDICT[mode], "Err_message", "NPU_Stack_Info"),
    ]


def cells(row: Row, mode: Mode, stack: Sequence[str]) -> list[Any]:
    """A row's values in the order of `columns`; ``N/A`` where there is nothing."""
    sides = (row.a, row.b)
    found = [
        *(None if is_absent else row.name for is_absent in _absent_sides(row)),
        *(leaf and leaf.dtype for leaf in sides),
        *(leaf and str(list(leaf.shape)) for leaf in sides),
        *(leaf and _word(leaf.requires_grad) for leaf in sides),
        *_middle(row, mode),
        *(_given(leaf, key) for leaf in sides for key in STATISTICS if mode != "md5"),
        *(_word(row.requires_grad_consistent), row.result, row.message, "\n".join(stack) or None),
    ]
    return ["N/A" if cell is None else cell for cell in found]


def _word(known: bool | None) -> str | None:
    return None if known is None else str(known)


def _absent_sides(row: Row) -> tuple[bool, bool]:
    if row.only:
        return row.only == "B", row.only == "A"
    return row.a is None and row.b is not None, row.b is None and row.a is not None


def _middle(row: Row, mode: Mode) -> list[Any]:
    if mode == "md5":
        return [leaf and leaf.md5 for leaf in (row.a, row.b)]
    if mode == "statistics":
        return [*(pair[0] for pair in row.differences), *(_percent(pair[1]) for pair in row.differences)]
    close = row.closeness
    if close is None:
        return [None] * len(_MIDDLE[mode])
    return [
        *(close.cosine, close.euclidean, close.max_abs, close.max_relative),
        *(close.one_thousandth, close.five_thousandths),
    ]


def _given(leaf: DumpLeaf | None, key: str) -> Any:
    """A statistic as the dump has it; of a plain value, that."""
    return leaf and (leaf.raw.get(key) if leaf.is_tensor else leaf.value)


def _percent(ratio: float | None) -> str | None:
    if ratio is None:
        return None
    return f"{ratio * 100:.6g}%" if math.isfinite(ratio) else str(ratio)


def table(rows: Iterable[Row], mode: Mode, stacks: Callable[[str], Sequence[str]]) -> Iterator[list[Any]]:
    """Rows of a CSV file, its header first."""
    yield columns(mode)
    for row in rows:
        yield cells(row, mode, stacks(row.entry))


def table_path(path: Path, rank: int, many: bool) -> Path:
    """One file per rank, where there are several: ``result.csv`` becomes ``result_rank3.csv``."""
    return path.with_name(f"{path.stem}_rank{rank}{path.suffix}") if many else path


_AS_THEY_ARE = ("name", "entry", "path", "index", "result", "message", "unequal", "color", "reason")


def as_dict(row: Row, stack: Sequence[str] = (), parent: object = None) -> dict[str, Any]:
    """A row for JSON."""
    return {
        **{key: getattr(row, key) for key in _AS_THEY_ARE},
        "differences": {key: pair[0] for key, pair in zip(STATISTICS, row.differences, strict=True)},
        "relative_errors": {key: pair[1] for key, pair in zip(STATISTICS, row.differences, strict=True)},
        "a": row.a and row.a.raw,
        "b": row.b and row.b.raw,
        "closeness": row.closeness and row.closeness.as_json(),
        "stack": list(stack),
        "parent": parent,
    }
