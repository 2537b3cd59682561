"""Makes the rows of two entries of one NAME.

1. Take what has the same path in both, in the order in which a call meets it: inputs, arguments by name, parameters,
   outputs. An output that differs because a parameter does stands behind it then.
2. Tensors are compared if the entries have the same number of them and this one has the same shape: their statistics,
   and in another mode their checksums or elements. Everything else is a row without a comparison, ``N/A``.
3. Plain arguments are compared by value, None too; one that a side lacks is a difference. A device's name is not
   compared, since two runs may well be on different ones, nor is what the dump has no value of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from ddpstats._base.text import count_of
from ddpstats.dump.compare._rows import DIFFERENT, NO, NOT_COMPARED, PASS, WARNING, YES, Mode, Row
from ddpstats.dump.compare._rules import (
    Closeness,
    Difference,
    difference,
    is_near_zero,
    is_over,
    statistics_color,
    tensor_color,
)
from ddpstats.dump.reader import STATISTICS, DumpEntry, DumpLeaf, number

_PLAIN = {"int", "float", "bool", "str", "complex", "None", "slice", "ellipsis", "torch.dtype", "torch.Size"}
_MEAN = STATISTICS.index("Mean")
_ORDER = {"input": 0, "input_kwargs": 1, "parameters": 2, "output": 4}  # 3 for all others
_BESIDES = ("md5", "nan_count", "inf_count", "first_bad", "requires_grad")  # compared where both have them
_VERDICTS: dict[Mode, tuple[str, str]] = {"statistics": ("", WARNING), "md5": (PASS, DIFFERENT), "tensor": (YES, NO)}

CompareTensors = Callable[[DumpLeaf, DumpLeaf], Closeness]


class EntryComparer:
    """Makes rows.

    Args:
        mode: what is compared.
        tolerance: a relative error above it fails, of a statistic (where these are compared) or a plain number.
        tensors: compares two saved tensors, in tensor mode.
    """

    def __init__(self, mode: Mode, tolerance: float, tensors: CompareTensors | None = None) -> None:
        self.mode = mode
        self.tolerance = tolerance
        self._tensors = tensors

    def rows(self, index: int, a: DumpEntry, b: DumpEntry) -> list[Row]:
        """Of two entries of one NAME."""
        of_a, of_b = dict(a.values(nulls=True)), dict(b.values(nulls=True))
        tensors_a, tensors_b = (sum(leaf.is_tensor for leaf in of.values()) for of in (of_a, of_b))
        counts = f"A has {count_of(tensors_a, 'tensors')} here, B {tensors_b}" if tensors_a != tensors_b else ""
        rows: list[Row] = []
        for path in _in_order(of_a | of_b):
            leaf_a, leaf_b = of_a.get(path), of_b.get(path)
            if _is_to_compare(leaf_a, leaf_b):
                rows.append(self._any(Row(index, a.name, path, leaf_a, leaf_b, place=len(rows)), counts))
        _highlight(rows, self.mode)
        return rows

    def alone(self, index: int, entry: DumpEntry, side: Literal["A", "B"]) -> list[Row]:
        """Of an entry that one dump has."""
        found = dict(entry.leaves())
        paths: Sequence[str] = _in_order(found) or [""]
        rows = []
        for place, path in enumerate(paths):
            a, b = (found.get(path), None) if side == "A" else (None, found.get(path))
            row = Row(index, entry.name, path, a, b, only=side, place=place)
            rows.append(_not_compared(row, f"only {side} has this entry"))
        return rows

    def _any(self, row: Row, counts: str) -> Row:
        """A row of which one side may be missing; ``counts`` is how the numbers of tensors differ, if they do."""
        a, b = row.a, row.b
        if a is not None and b is not None and not (counts and (a.is_tensor or b.is_tensor)):
            return self._both(row, a, b)
        if any(leaf is not None and leaf.is_tensor for leaf in (a, b)):
            return _not_compared(row, counts or f"only {'A' if b is None else 'B'} has a tensor of this path")
        row.unequal, row.result = True, _VERDICTS[self.mode][1]
        row.message = f"only {'A' if b is None else 'B'} has this argument"
        return row

    def _both(self, row: Row, a: DumpLeaf, b: DumpLeaf) -> Row:
        if a.is_tensor != b.is_tensor:
            return _not_compared(row, f"A has a {a.type} here, B a {b.type}")
        if not a.is_tensor:
            return self._plain(row, a, b)
        if a.raw.get("shape") != b.raw.get("shape"):
            return _not_compared(row, f"the shape is {list(a.shape)} in A and {list(b.shape)} in B")
        if self.mode == "md5":
            _statistics(row, a, b)
            return self._md5(row, a, b)
        if self.mode == "tensor" and (a.data_name is not None or b.data_name is not None):
            _statistics(row, a, b)
            return self._tensor(row, a, b)
        return self._by_statistics(row, a, b)

    def _by_statistics(self, row: Row, a: DumpLeaf, b: DumpLeaf) -> Row:
        row.by_statistics = self.mode == "tensor"
        if not _statistics(row, a, b):
            return _not_compared(row, row.message)
        over = [is_over((pair[1],), self.tolerance) for pair in row.differences]
        row.result = WARNING if any(over) else ""
        if over[_MEAN] and sum(over) == 1 and is_near_zero(a, b):
            _say(row, "only the mean, which is near 0")
        if row.by_statistics:
            how = "over the tolerance" if any(over) else "unequal" if row.unequal else "equal"
            _say(row, f"neither saved it; statistics {how}")
        return row

    def _plain(self, row: Row, a: DumpLeaf, b: DumpLeaf) -> Row:
        apart_in_kind = any((a.type in kinds) != (b.type in kinds) for kinds in (_PLAIN, {"bool"}))
        row.unequal = over = a.value != b.value or apart_in_kind
        if {a.type, b.type} <= {"float", "int"} and "float" in (a.type, b.type):
            apart = _numbers(a.value, b.value)
            if apart[1] is not None:
                row.differences = (apart,) * len(STATISTICS)
                row.unequal, over = bool(apart[0]), is_over((apart[1],), self.tolerance)
        if row.unequal:
            words = [repr(leaf.value) if leaf.type in _PLAIN else f"a {leaf.type}" for leaf in (a, b)]
            row.message = f"{words[0]} in A and {words[1]} in B"
        row.result = _VERDICTS[self.mode][over]
        return row

    def _md5(self, row: Row, a: DumpLeaf, b: DumpLeaf) -> Row:
        if a.md5 is None or b.md5 is None:
            return _not_compared(row, f"{_without(a.md5, b.md5)} no md5 of this tensor")
        row.result = PASS if a.md5 == b.md5 else DIFFERENT
        return row

    def _tensor(self, row: Row, a: DumpLeaf, b: DumpLeaf) -> Row:
        if a.data_name is None or b.data_name is None or self._tensors is None:
            return _not_compared(row, f"{_without(a.data_name, b.data_name)} not saved this tensor")
        close = row.closeness = self._tensors(a, b)
        row.unequal = row.unequal or not close.equal
        row.result = YES if close.accurate else NO
        if not close.equal:
            _say(row, close.runs.describe())
        return row


def _in_order(paths: Iterable[str]) -> list[str]:
    return sorted(paths, key=lambda path: _ORDER.get(path.split(".", 1)[0], 3))


def _is_to_compare(*leaves: DumpLeaf | None) -> bool:
    """Whether one of them can be compared, and none is of a type that never is."""
    types = [leaf.type for leaf in leaves if leaf is not None]
    return "torch.device" not in types and any(
        leaf is not None and (leaf.is_tensor or leaf.type in _PLAIN) for leaf in leaves
    )


def _without(a: object, b: object) -> str:
    return "both have" if a is None and b is None else "A has" if a is None else "B has"


def _say(row: Row, words: str) -> None:
    row.message = "; ".join(filter(None, (row.message, words)))


def _not_compared(row: Row, why: str) -> Row:
    row.result, row.message, row.unequal = NOT_COMPARED, why, True
    return row


def _numbers(a: Any, b: Any) -> Difference:
    try:
        return difference(number(a), number(b))
    except ValueError:
        return None, None


def _statistics(row: Row, leaf_a: DumpLeaf, leaf_b: DumpLeaf) -> bool:
    """Fill in the differences, whether anything differs at all, and why; False if there was nothing to compare.

    What only our own dumps have is no difference where the other side does not have it; a statistic is.
    """
    a, b = leaf_a.raw, leaf_b.raw
    known = [(number(a.get(key)), number(b.get(key))) for key in STATISTICS]
    row.differences = tuple(difference(*pair) for pair in known)
    besides = [key for key in _BESIDES if a.get(key) is not None and b.get(key) is not None and a[key] != b[key]]
    row.unequal = bool(besides) or any(pair[0] for pair in row.differences)
    if a.get("dtype") != b.get("dtype"):
        row.unequal = True
        _say(row, f"the dtype is {leaf_a.dtype} in A and {leaf_b.dtype} in B")
    for key in besides:
        _say(row, "the checksums differ" if key == "md5" else f"{key} is {a[key]} in A and {b[key]} in B")
    one_sided = False
    for side, missing in (("A", 0), ("B", 1)):
        lacking = [
            key
            for key, pair in zip(STATISTICS, known, strict=True)
            if pair[missing] is None and pair[1 - missing] is not None
        ]
        if lacking:
            one_sided = row.unequal = True
            _say(row, f"{side} has no {', '.join(lacking)}")
    return not one_sided or any(pair[0] is not None for pair in row.differences)


def _highlight(rows: list[Row], mode: Mode) -> None:
    """Color the rows of one entry: what happens to an output depends on its inputs."""
    inputs = [row for row in rows if row.role == "input" and row.a is not None and row.b is not None]
    maxima = [pair for row in inputs if (pair := _maxima(row)) != (None, None)]
    close = [row.closeness for row in inputs if row.closeness is not None]
    for row in rows:
        if row.a is None or not row.a.is_tensor:
            continue
        role: Literal["input", "output", ""] = row.role if row.role != "parameter" else ""
        found = statistics_color(role, _maxima(row), row.a.min, [pair[0] for pair in row.differences], maxima)
        if mode == "tensor" and found is None and row.closeness is not None and role == "output":
            ratios, cosines = [one.one_thousandth for one in close], [one.cosine for one in close]
            found = tensor_color(row.closeness.one_thousandth, row.closeness.cosine, ratios, cosines)
        if found is None and row.requires_grad_consistent is False:
            found = "yellow", "requires_grad differs"
        if found is not None:
            row.color, row.reason = found


def _maxima(row: Row) -> tuple[float | None, float | None]:
    known = [leaf.max if leaf is not None and leaf.is_tensor else None for leaf in (row.a, row.b)]
    return known[0], known[1]
