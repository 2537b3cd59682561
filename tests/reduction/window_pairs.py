"""Random adds for windows, and the same adds as the oracle takes them; what runs on ranks to reduce them.

`Draw` is faster than a hypothesis strategy, so that 100,000 adds are a matter of minutes.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

import ddpstats
from ddpstats import All, Any as AnyFlag, Max, Mean, Min, StatsWindow, Sum
from ddpstats._reduction.ops import Marker
from ddpstats.errors import NonFiniteStat
from ddpstats.testing import PerRank, RankPool
from ddpstats.testing.strategies import RankStats
from tests.reduction.oracle import Computed, Exact, exact_mean, expected_of_window, same

POLICIES = ("propagate", "skip", "raise")
KEYS = ["loss", "acc", "l1_loss", "a/b", "a", "b", "0", "", 0, 1, -3]
MARKERS: dict[str, type[Marker]] = {"sum": Sum, "min": Min, "max": Max, "any": AnyFlag, "all": All}
OPS = ["mean"] * 5 + ["own", "own", *MARKERS]
OTHER_KINDS: list[Callable[[float], Any]] = [
    np.float32,
    np.float64,
    lambda number: np.array(number),
    lambda number: np.array([[number]]),
    lambda number: torch.nn.Parameter(torch.tensor(number)),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float32, torch.float64]

WIDE = (100, 300)
"""Leaves of a wide tree: from 96 on a window stacks them, and from 256 on torch multiplies them."""
WIDE_EVERY = 20
"""Seeds of which one has a wide tree, and a quarter of the reductions."""

Add = tuple[Any, Any]
"""Stats and weight."""
Reduction = tuple[str, bool, list[Add]]
"""A policy, whether ``per_rank`` is asked for, and what each rank reduces."""


class Draw:
    """The adds of one seed.

    Args:
        tensors: how often a number is a tensor.
        wild: how often it has any exponent.
    """

    def __init__(self, seed: int, tensors: float = 0.6, wild: float = 0.0) -> None:
        self.random, self.tensors, self.wild = random.Random(seed), tensors, wild
        self.wide = WIDE[seed // WIDE_EVERY % len(WIDE)] if seed % WIDE_EVERY == 0 else 0
        # Draws what a rank leaves out and where it has elements, so that these can repeat while numbers change.
        self.shape = random.Random(~seed)
        self.bad = self.random.choice([0.0, 0.02, 0.3])
        self.uniform: torch.dtype | None = None  # where all leaves are tensors of one dtype and shape

    def window(self, ranks: int) -> tuple[str, list[list[Add]]]:
        """A policy, and each rank's adds: parts of one tree, or the whole of it again and again."""
        self.steady = self.random.random() < 0.4
        self.plain = self.random.random() < 0.3
        tree = self.tree(self.random.choice([1, 1, 2, 3]), root=True)
        most = self.random.choice([0, 1, 3, 12, 30])
        return self.random.choice(POLICIES), [
            [self.add(tree) for _ in range(self.random.randint(0, most))] for _ in range(ranks)
        ]

    def reductions(self, ranks: int, count: int) -> Iterator[Reduction]:
        """On one tree: as in a training, most leave out what the one before has left out."""
        self.steady, self.plain = self.random.random() < 0.4, self.random.random() < 0.2
        tree = self.tree(self.random.choice([1, 1, 2, 3]), root=True)
        policy, per_rank = self.random.choice(POLICIES), self.random.random() < 0.3
        for _ in range(-(-count // 4) if self.wide else count):
            before = self.shape.getstate()
            yield policy, per_rank, [self.add(tree) for _ in range(ranks)]
            if self.random.random() < 0.8:
                self.shape.setstate(before)

    def tree(self, depth: int, root: bool = False) -> Any:
        if root and self.wide:
            self.plain = self.steady = True
            self.uniform = self.random.choice([None, *DTYPES])
            return "dict", {f"k{i}": self.tree(0) for i in range(self.wide)}
        kind = self.random.choice(["dict", "dict", "OrderedDict", "list", "tuple", "leaf", "leaf"])
        if not root and (depth == 0 or kind == "leaf"):
            return "leaf", "mean" if self.plain else self.random.choice(OPS)
        if not root and kind in ("list", "tuple"):
            return kind, [self.tree(depth - 1) for _ in range(self.random.randint(0, 3))]
        keys = self.random.sample(KEYS, self.random.randint(0, 5))
        return ("dict" if root else kind), {key: self.tree(depth - 1) for key in keys}

    def add(self, tree: Any) -> Add:
        if self.shape.random() < 0.15:
            length = self.shape.choice([0, 1, 2, 3])
            self.elements = [self.random.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(length)]
            return self.part(tree), torch.tensor(self.elements)
        self.elements = []
        weight: Any = self.random.choice([0.0, 0.5, 1.0, 1.0, 3.0, 8, 8])
        if self.random.random() < self.wild / 5:
            return self.part(tree), self.random.choice([1e-100, 1e-30, 1e100])
        if self.random.random() < 0.15:
            weight = torch.tensor(weight)
        return self.part(tree), weight

    def part(self, tree: Any) -> Any:
        kind, content = tree
        if not self.steady and self.shape.random() < 0.08:
            return None
        if kind == "leaf":
            return self.leaf(content)
        if isinstance(content, dict):
            held = [key for key in content if self.steady or self.shape.random() < 0.75]
            if not self.steady:
                self.shape.shuffle(held)
            items = [(key, self.part(content[key])) for key in held]
            return dict(items) if kind == "dict" else OrderedDict(items)
        values = [self.part(child) for child in content[: len(content) if self.steady else self.length(content)]]
        if self.shape.random() < 0.2 and not self.steady:
            kind = self.shape.choice(["list", "tuple"])
        return values if kind == "list" else tuple(values)

    def length(self, content: list[Any]) -> int:
        return self.shape.randint(0, len(content))

    def leaf(self, op: str) -> Any:
        if op in ("any", "all"):
            return MARKERS[op](self.tensor(float(self.random.random() < 0.7)))
        if op == "mean" and self.uniform is not None:
            if self.random.random() < 0.002:
                return torch.tensor([2**41 + 1])  # stacked with tensors of a float dtype, it would lose bits
            return torch.tensor([self.number()], dtype=self.uniform)
        if op == "mean":
            return self.tensor(*[self.number() for _ in self.elements or [0]]) if self.whole() else self.number_leaf()
        if op == "own":
            weight: Any = self.random.choice([0.0, 2.0, 5])
            return Mean(self.number_leaf(), torch.tensor(weight) if self.random.random() < self.tensors else weight)
        return MARKERS[op](self.number_leaf())

    def whole(self) -> bool:
        """Draw whether a leaf has one element for each element of a 1-d weight."""
        return bool(self.elements) and self.shape.random() < 0.6

    def number(self) -> float:
        if self.random.random() < self.bad:
            return self.random.choice([math.nan, math.inf, -math.inf])
        if self.random.random() < 0.03:
            return float(self.random.randint(-(2**41), 2**41))  # not a float32
        if self.random.random() < self.wild:
            return self.random.uniform(-1, 1) * 2.0 ** self.random.choice([0, 0, 3, 60, 140, 660, -60, -1060])
        return self.random.choice([0.0, 1.0, self.random.randint(-500, 500) / 8])

    def number_leaf(self) -> Any:
        number = self.number()
        if self.random.random() < self.tensors:
            return self.tensor(number)
        if math.isfinite(number) and self.random.random() < 0.2:
            return int(number)
        if self.random.random() < 0.15 and not 3e38 < abs(number) < math.inf:  # otherwise numpy warns
            return self.random.choice(OTHER_KINDS)(number)
        return number

    def whole_dtypes(self, numbers: Sequence[float]) -> list[torch.dtype]:
        low, high = min(numbers, default=0), max(numbers, default=0)
        dtypes = [torch.int64]
        dtypes += [torch.int32, torch.int16] if low >= -(2**15) and high < 2**15 else []
        dtypes += [torch.uint8] if low >= 0 and high < 2**8 else []
        return dtypes + ([torch.bool] if low >= 0 and high <= 1 else [])

    def tensor(self, *numbers: float) -> torch.Tensor:
        whole = all(map(math.isfinite, numbers)) and all(number == int(number) for number in numbers)
        if whole and self.random.random() < 0.2 and max(map(abs, numbers), default=0) < 2**53:
            return torch.tensor(
                [int(number) for number in numbers], dtype=self.random.choice(self.whole_dtypes(numbers))
            )
        made = torch.tensor(numbers, dtype=DTYPES[0] if self.random.random() < 0.05 else self.random.choice(DTYPES))
        if len(numbers) == 1 and self.random.random() < 0.6:
            made = made.reshape(self.random.choice([(), (), (1, 1)]))
        return made.requires_grad_() if self.random.random() < 0.1 else made


def as_scalars(add: Add) -> RankStats:
    """Return one add as the oracle takes it: each leaf of several elements is one mean with its own weight."""
    stats, weight = add
    elements = weight.tolist() if isinstance(weight, torch.Tensor) and weight.dim() else None
    return RankStats(_scalars(stats, elements), float(weight.sum() if isinstance(weight, torch.Tensor) else weight))


def _scalars(stats: Any, elements: list[float] | None) -> Any:
    if isinstance(stats, dict):
        return {key: _scalars(value, elements) for key, value in stats.items()}
    if isinstance(stats, list | tuple):
        return type(stats)(_scalars(value, elements) for value in stats)
    if isinstance(stats, torch.Tensor) and stats.numel() != 1:
        assert elements is not None
        total = sum(elements)
        held = [(value, weight) for value, weight in zip(stats.tolist(), elements, strict=True) if weight > 0]
        if not all(math.isfinite(value) for value, _ in held):
            return Mean(sum(value for value, _ in held if not math.isfinite(value)), total)
        mean, scale = exact_mean(held)
        return Mean(Computed(mean or Fraction(0), scale), total)
    return stats


def columns_of(reduced: ddpstats.Reduced) -> dict[str, Any]:
    return {
        "values": reduced.values,
        "weights": reduced.weights,
        "present": reduced.present_ranks,
        "nonfinite": reduced.nonfinite_ranks,
        "total": reduced.total_weight,
        "flat": reduced.flat(),
    }


_kept: dict[str, StatsWindow] = {}


def flushed(adds: Sequence[Add], policy: Any, name: str | None = None) -> dict[str, Any] | str:
    """Return the columns of one window's flush of these adds, or its error; under ``name`` the window is kept."""
    window = _kept.get(f"{name}{policy}") or StatsWindow(name=name, nonfinite=policy, timeout_sec=60)
    if name is not None:
        _kept[f"{name}{policy}"] = window
    for stats, weight in adds:
        window.add(stats, weight)
    assert window.adds == len(adds)
    try:
        return columns_of(window.flush())
    except NonFiniteStat as error:
        return str(error)
    finally:
        assert window.adds == 0


def many_flushed(windows: Sequence[tuple[str, Sequence[Add]]], name: str) -> list[Any]:
    return [flushed(adds, policy, name) for policy, adds in windows]


def check(by_rank: Sequence[Sequence[Add]], answers: Sequence[Any], policy: str) -> None:
    assert len(set(map(repr, answers))) == 1, answers
    scalars = [[as_scalars(add) for add in adds] for adds in by_rank]
    wanted = expected_of_window(scalars, policy)
    if policy == "raise" and any(_numbers(wanted["nonfinite"])):
        assert isinstance(answers[0], str), (answers[0], wanted)
        assert answers[0].startswith("non-finite stats")
        return
    answer = answers[0]
    assert len(answer["flat"]) == len(_numbers(wanted["values"]))
    for what, nested in wanted.items():
        assert same(answer[what], nested), (what, answer[what], nested, by_rank)
    assert math.isclose(answer["total"], sum(add.weight for adds in scalars for add in adds))


def _numbers(nested: Any) -> list[Any]:
    if isinstance(nested, dict):
        return [number for value in nested.values() for number in _numbers(value)]
    if isinstance(nested, list | tuple) and not isinstance(nested, Exact):
        return [number for value in nested for number in _numbers(value)]
    return [nested] if nested is not None else []


def check_many(pool: RankPool, ranks: int, seeds: Sequence[int], name: str, tensors: float = 0.6) -> int:
    """Draw a window for each seed, flush it on real ranks, and compare; return how many adds there were."""
    drawn = [Draw(seed, tensors, wild=0.1).window(ranks) for seed in seeds]
    flushes = pool.run(many_flushed, PerRank([[(p, w[rank]) for p, w in drawn] for rank in range(ranks)]), name)
    for (policy, by_rank), *answers in zip(drawn, *flushes.values(), strict=True):
        check(by_rank, answers, policy)
    return sum(len(adds) for _, by_rank in drawn for adds in by_rank)
