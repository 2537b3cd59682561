"""Rows of a comparison as a table: the known tool's columns, in which A is its "NPU" and B its "Bench"."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ddpstats._base.report import harmless
from ddpstats.dump.compare._rows import Mode, Row
from ddpstats.dump.format._entries import STATISTICS, DumpLeaf

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
