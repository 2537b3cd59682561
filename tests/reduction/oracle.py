"""The exact result of a reduction in plain Python: path by path, without buffers, layouts or collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from ddpstats._reduction.ops import Marker, Mean
from ddpstats.testing.strategies import RankStats

Path = tuple[tuple[str, Any], ...]


class Exact(NamedTuple):
    """A number that a reduction computes, and so rounds. ``value``: None is NaN; ``scale``: of its magnitudes."""

    value: Fraction | None
    scale: Fraction


class Computed(Fraction):
    """A number that a rank does not hold but computes, and so rounds. ``scale``: of the magnitudes it is made of."""

    scale: Fraction

    def __new__(cls, value: Fraction, scale: Fraction) -> Computed:
        made = super().__new__(cls, value)
        made.scale = scale
        return made


def expected_of_window(by_rank: Sequence[Sequence[RankStats]], nonfinite: str = "propagate") -> dict[str, Any]:
    """Return the columns of `Reduced` for all adds of all ranks: values, weights, present and non-finite ranks."""
    entries, kinds = _entries([add for adds in by_rank for add in adds], nonfinite)
    of_ranks = [_entries(adds, nonfinite)[0] for adds in by_rank]
    columns: dict[str, dict[Path, tuple[Any, ...]]] = {"values": {}, "weights": {}, "present": {}, "nonfinite": {}}
    for path, (value, weight, *_) in entries.items():
        held = [entries_of_rank[path] for entries_of_rank in of_ranks if path in entries_of_rank]
        columns["values"][path], columns["weights"][path] = (value,), (Exact(Fraction(weight), Fraction(weight)),)
        columns["present"][path] = (sum(entry[2] > 0 for entry in held),)
        columns["nonfinite"][path] = (sum(entry[3] > 0 for entry in held),)
    return {name: _nest(column, (), kinds) for name, column in columns.items()}


def _entries(ranks: Sequence[RankStats], nonfinite: str) -> tuple[dict[Path, tuple[Any, ...]], dict[Path, set[type]]]:
    held: dict[Path, list[tuple[Any, float]]] = {}
    kinds: dict[Path, set[type]] = {}
    for rank in ranks:
        for path, leaf in _leaves(rank.stats, (), kinds):
            held.setdefault(path, []).append((leaf, rank.weight))
    entries: dict[Path, tuple[Any, ...]] = {}
    for path, leaves in held.items():
        below = any(longer[: len(path)] == path and len(longer) > len(path) for longer in held)
        values = [(leaf, weight) for leaf, weight in leaves if not _is_none(leaf)]
        if values:
            entries[path] = _entry(values, nonfinite)
        elif not below:
            entries[path] = (None, 0.0, 0, 0)
    return entries, kinds


def expected_by_rank(ranks: Sequence[RankStats], nonfinite: str = "propagate", spell: Callable[..., Any] = repr) -> Any:
    """Nested like the values: for each path what each rank holds, None where it adds nothing; as ``spell`` has it."""
    rows: dict[Path, list[Any]] = {}
    for position, rank in enumerate(ranks):
        for path, leaf in _leaves(rank.stats, (), {}):
            rows.setdefault(path, [None] * len(ranks))[position] = _own_value(leaf, rank.weight, nonfinite)
    entries, kinds = _entries(ranks, nonfinite)
    return _nest({path: (spell(tuple(rows[path])),) for path in entries}, (), kinds)


def _own_value(leaf: Any, weight: float, nonfinite: str) -> Any:
    if _is_none(leaf):
        return None
    op = leaf.op.name if isinstance(leaf, Marker) else "mean"
    own = leaf.weight if isinstance(leaf, Mean) and leaf.weight is not None else weight
    inner = leaf.value if isinstance(leaf, Marker) else leaf
    number = _number(inner)
    if (op == "mean" and own == 0) or (nonfinite == "skip" and not math.isfinite(number)):
        return None
    if isinstance(number, Fraction):
        return Exact(number, scale_of(number))
    return bool(number) if op in ("any", "all") else number


def scale_of(value: Any) -> Fraction:
    return value.scale if isinstance(value, Computed) else abs(Fraction(value))


def _number(value: Any) -> float | Fraction:
    return value if isinstance(value, Fraction) else float(value.item() if hasattr(value, "item") else value)


def _leaves(value: Any, path: Path, kinds: dict[Path, set[type]]) -> Iterator[tuple[Path, Any]]:
    leaves: list[tuple[Path, Any]] = []
    if isinstance(value, dict):
        for key, child in value.items():
            leaves += _leaves(child, (*path, ("key", key)), kinds)
    elif isinstance(value, list | tuple):
        for position, child in enumerate(value):
            leaves += _leaves(child, (*path, ("position", position)), kinds)
    else:
        yield path, value
        return
    if leaves or not path:
        kinds.setdefault(path, set()).add(type(value))
    yield from leaves


def _is_none(leaf: Any) -> bool:
    return leaf is None or (isinstance(leaf, Marker) and leaf.value is None)


def _entry(values: list[tuple[Any, float]], nonfinite: str) -> tuple[Any, ...]:
    op = values[0][0].op.name if isinstance(values[0][0], Marker) else "mean"
    rows = []
    for leaf, weight in values:
        own = leaf.weight if isinstance(leaf, Mean) and leaf.weight is not None else weight
        inner = leaf.value if isinstance(leaf, Marker) else leaf
        rows.append((_number(inner), Fraction(float(own)) if op == "mean" else Fraction(1)))
    bad = sum(not math.isfinite(number) for number, weight in rows if weight > 0)
    if nonfinite == "skip":
        rows = [(number, weight) for number, weight in rows if weight == 0 or math.isfinite(number)]
    total = sum((weight for _, weight in rows), Fraction(0))
    return _value(op, [row for row in rows if row[1] > 0]), total, len(rows), bad


def _value(op: str, rows: list[tuple[Any, Fraction]]) -> Any:
    numbers = [number for number, _ in rows]
    if not numbers:
        return math.nan
    if op in ("mean", "sum") and not all(map(math.isfinite, numbers)):
        return sum(number for number in numbers if not math.isfinite(number))
    if op == "mean":
        return Exact(*exact_mean(rows))
    if op == "any":
        return any(numbers)
    if op == "all":
        return all(numbers)
    if op == "sum":
        exact = list(map(Fraction, numbers))
        return Exact(sum(exact, Fraction(0)), sum(map(abs, exact), Fraction(0)))
    if any(map(math.isnan, numbers)):
        return math.nan
    return min(numbers) if op == "min" else max(numbers)


def _nest(entries: dict[Path, tuple[Any, ...]], path: Path, kinds: dict[Path, set[type]]) -> Any:
    if path in entries:
        return entries[path][0]
    children: dict[Any, Any] = {}
    for longer in entries:
        if longer[: len(path)] == path and len(longer) > len(path):
            step = longer[len(path)]
            children.setdefault(step, None)
    nested = {step: _nest(entries, (*path, step), kinds) for step in children}
    types = kinds.get(path, {dict})
    if next(iter(types)) in (list, tuple):
        length = max((position for _, position in nested), default=-1) + 1
        filled = [nested.get(("position", position)) for position in range(length)]
        return tuple(filled) if types == {tuple} else filled
    return {key: value for (_, key), value in nested.items()}


def same(left: Any, right: Any) -> bool:
    """Compare structures, types and numbers, NaN equal to NaN; the order of keys does not count.

    Where ``right`` has an `Exact`, ``left`` has it up to rounding.
    """
    if isinstance(right, Exact):
        return type(left) is float and is_near(left, *right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return set(left) == set(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and not isinstance(left, bool):
        return (math.isnan(left) and math.isnan(right)) or left == right
    return bool(left == right)


def exact_mean(held: Sequence[tuple[Any, Any]]) -> tuple[Fraction | None, Fraction]:
    """Return the mean of the (value, weight), None where the weight is 0, and the mean of the absolute values."""
    rows = [(Fraction(value), scale_of(value), Fraction(weight)) for value, weight in held]
    total = sum((weight for *_, weight in rows), Fraction(0))
    if not total:
        return None, Fraction(0)
    summed = sum((value * weight for value, _, weight in rows), Fraction(0))
    return summed / total, sum((scale * weight for _, scale, weight in rows), Fraction(0)) / total


def is_near(number: float, exact: Fraction | None, scale: Fraction) -> bool:
    """Return whether the number is within 2**-49 of ``scale``, or within 1e-200, of the exact one.

    ``scale`` is not smaller than ``exact``. A product of a value and a weight below 1e-308 counts as 0.
    """
    if exact is None:
        return math.isnan(number)
    return math.isfinite(number) and abs(Fraction(number) - exact) <= scale / 2**49 + Fraction(1e-200)
