"""When two values count as different: the known tool's rules for statistics and tensors, and what they leave open.

A relative error is ``|a - b| / |b|``, b being the reference; as a ratio, so 0.5 is 50 %. Beyond the plain case:

- both 0, both NaN, or the same infinity: 0;
- a NaN on one side only: NaN, which is over every tolerance;
- an infinity on one side only, two infinities of opposite sign, or a reference of 0 with another value: infinite;
- a statistic that neither side has (the mean of booleans): not compared; one that a single side has: unequal, and no
  number says by how much.

Elements that differ are told as runs in memory order, with what their size and place speak for. A wrong computation
differs in scattered places or everywhere. Memory that another kernel wrote over differs in one contiguous block, often
of a size that is a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpstats.dump.reader import DumpLeaf

KEPT_RUNS = 1000
_SHOWN_RUNS = 4
_FEW_RUNS = 8


@dataclass(frozen=True)
class Runs:
    """Runs of elements that differ, in flat memory order.

    Attributes:
        elements: of the whole tensor.
        differing: elements that differ.
        count: how many runs there are.
        largest: elements of the largest.
        first: the first ones, as (start, stop) with stop excluded; at most `KEPT_RUNS`.
        item_bytes: of one element.
        flipped_bits: in how many bits the only differing element differs; None where there are more, or none
            can tell.
        is_dense: the tensor has no gaps in memory, so that neighbours in it are neighbours there.
    """

    elements: int
    differing: int
    count: int
    largest: int
    first: tuple[tuple[int, int], ...]
    item_bytes: int
    flipped_bits: int | None = None
    is_dense: bool = True

    def as_json(self) -> dict[str, Any]:
        known = {key: value for key, value in vars(self).items() if key != "is_dense"}
        return known | {"first": [list(run) for run in self.first[:100]], "words": self.describe()}

    def describe(self) -> str:
        """In words."""
        if not self.count:
            return f"all {self.elements:,} elements are equal"
        if self.differing == self.elements:
            return f"all {self.elements:,} elements differ: no block of memory stands out"
        if self.count == 1:
            return self._one(*self.first[0])
        share = f"{self.differing:,} of {self.elements:,} elements differ, in {self.count:,} runs"
        shown = ", ".join(_words(start, stop) for start, stop in self.first[:_SHOWN_RUNS])
        more = ", ..." if self.count > _SHOWN_RUNS else ""
        if self.is_dense and self.count <= _FEW_RUNS and self.largest * self.count >= 64:
            sizes = {stop - start for start, stop in self.first}
            same = f" of {_size(self.largest, self.item_bytes)} each" if len(sizes) == 1 else ""
            return f"{share}{same}: {shown}{more}; a few contiguous blocks, which memory written over looks like"
        return f"{share}, the largest of {self.largest:,}: {shown}{more}; scattered, as computed values differ"

    def _one(self, start: int, stop: int) -> str:
        where = f"{_words(start, stop)} of {self.elements} differ{'s' * (stop - start == 1)}"
        if stop - start == 1:
            return f"{where}: a single one" + (", by a single bit: a flipped one" if self.flipped_bits == 1 else "")
        if not self.is_dense:
            return f"{where}: in a row, in a view with gaps"
        speaks = ", which is what a buffer overwritten in memory looks like" if stop - start >= 16 else ""
        return f"{where}: contiguous, {_size(stop - start, self.item_bytes)}{speaks}"


def _words(start: int, stop: int) -> str:
    return f"element {start}" if stop - start == 1 else f"elements {start}..{stop - 1}"


def _size(elements: int, item_bytes: int) -> str:
    size = elements * item_bytes
    power = " (a power of two)" if size & (size - 1) == 0 else ""
    return f"{elements:,} element{'s' * (elements != 1)} = {_bytes(size)}{power}"


def _bytes(size: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            whole, rest = divmod(size, scale)
            return f"{whole:,} {unit}" if not rest else f"{size / scale:,.1f} {unit}"
    return f"{size:,} bytes"


# -- when values differ ------------------------------------------------------------------------------------------------

TOLERANCE = 0.5

Color = Literal["red", "yellow"]
Difference = tuple[float | None, float | None]

_HUGE = 1e10
_SMALLEST_SCALE = 0.01
_NEAR_ZERO = 0.01


@dataclass(frozen=True)
class Closeness:
    """How close two tensors are.

    Attributes:
        cosine: of the angle between them; 1 where both are zero, NaN where one holds what is not finite and the other
            differs there.
        euclidean: distance.
        max_abs: largest absolute difference.
        max_relative: largest relative difference; infinite where the reference is 0 and the other is not, NaN where
            what is not finite differs.
        one_thousandth: share of elements with a relative difference below 0.001.
        five_thousandths: the same below 0.005.
        runs: where they differ.
    """

    cosine: float
    euclidean: float
    max_abs: float
    max_relative: float
    one_thousandth: float
    five_thousandths: float
    runs: Runs

    @property
    def equal(self) -> bool:
        return self.runs.count == 0

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"runs": self.runs.as_json()}

    @property
    def accurate(self) -> bool:
        """The known tool's verdict on two tensors; NaN is never accurate."""
        if self.cosine != self.cosine or self.max_abs != self.max_abs:
            return False
        return not ((self.cosine < 0.99 and self.max_abs > 0.001) or self.cosine < 0.9 or self.max_abs > 1)


def difference(a: float | None, b: float | None) -> Difference:
    """``a - b``, and the relative error; None where a side has no value."""
    if a is None or b is None:
        return None, None
    if a == b or (a != a and b != b):
        return 0.0, 0.0
    if a != a or b != b:
        return math.nan, math.nan
    if math.isinf(a) or math.isinf(b) or b == 0:
        return a - b, math.inf
    return a - b, abs((a - b) / b)


def is_over(relatives: Iterable[float | None], tolerance: float) -> bool:
    """Whether one of the relative errors is over the tolerance; a NaN is over all of them."""
    return any(relative is not None and not relative <= tolerance for relative in relatives)


def is_near_zero(*leaves: DumpLeaf) -> bool:
    """Whether the mean of each is small against its own extremes: rounding alone changes it by much then."""
    for leaf in leaves:
        extremes = [abs(value) for value in (leaf.max, leaf.min) if value is not None]
        if leaf.mean is None or not extremes or not abs(leaf.mean) <= _NEAR_ZERO * max(extremes):
            return False
    return True


def statistics_color(
    role: Literal["input", "output", ""],
    maxima: tuple[float | None, float | None],
    minimum: float | None,
    differences: Sequence[float | None],
    input_maxima: Sequence[tuple[float | None, float | None]],
) -> tuple[Color, str] | None:
    """How a row of statistics is highlighted, and why.

    Args:
        role: what the tensor was to its call.
        maxima: Max of A and B.
        minimum: Min of A.
        differences: of Max, Min, Mean and Norm.
        input_maxima: Max of A and B, of every input of the same call.
    """
    if any(value is not None and not math.isfinite(value) for value in (maxima[0], minimum)):
        return "red", "NaN or infinity in A"
    if any(value is not None and abs(value) > _HUGE for value in differences):
        return "red", "a difference above 1e10"
    if role != "output":
        return None
    apart, relative = _apart(*maxima), _scaled(*maxima)
    if relative is not None and relative > 0.5:
        return "red", "the maximum of an output differs by more than 0.5 of the reference"
    inputs_apart = [value for pair in input_maxima if (value := _apart(*pair)) is not None]
    inputs_relative = [value for pair in input_maxima if (value := _scaled(*pair)) is not None]
    if apart is not None and inputs_apart and apart > 1 < max(inputs_apart) and apart >= 10 * max(inputs_apart):
        return "yellow", "the maxima of input and output differ, the output's ten times as much"
    if relative is not None and inputs_relative and relative > 0.1 and max(inputs_relative) < 0.01:
        return "yellow", "the maximum of an output differs by more than 0.1 while the inputs are within 0.01"
    return None


def tensor_color(
    ratio: float, cosine: float, input_ratios: Sequence[float], input_cosines: Sequence[float]
) -> tuple[Color, str] | None:
    """How an output's row of a tensor comparison is highlighted, from its inputs' one-thousandth ratios and cosines."""
    if input_ratios and min(input_ratios) > 0.9 and ratio < 0.6:
        return "red", "the one thousandth ratio falls from above 0.9 to below 0.6 between input and output"
    if input_ratios and min(input_ratios) - ratio > 0.1:
        return "yellow", "the one thousandth ratio falls by more than 0.1 between input and output"
    if input_cosines and min(input_cosines) - cosine > 0.1:
        return "yellow", "the cosine falls by more than 0.1 between input and output"
    return None


def _apart(a: float | None, b: float | None) -> float | None:
    apart = difference(a, b)[0]
    return None if apart is None else abs(apart)


def _scaled(a: float | None, b: float | None) -> float | None:
    apart = _apart(a, b)
    if apart is None or b is None or not apart:
        return apart
    return apart / max(_SMALLEST_SCALE, abs(b)) if math.isfinite(b) else math.inf
