"""What one rank has added up so far, slot by slot, in host memory; float64, and exact where a float64 is not enough.

Values are masked before they are multiplied, and a sum that would overflow goes on as a fraction: so a window of many
adds gives what a reduction of them all would.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from fractions import Fraction

import torch

from ddpstats._base.exact_sums import SMALLEST, Scaled, as_fraction
from ddpstats._reduction.values import weigh


class HostTotals:
    """Sums, weights and extremes per slot. ``skip``: what is not finite is left out, and only counted."""

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self.sums, self.weights, self.seen = array("d"), array("d"), bytearray()
        self.nonfinite: set[int] = set()
        self.exact: dict[int, Fraction] = {}

    def reserve(self, count: int) -> None:
        """Room for slots below ``count``."""
        more = count - len(self.sums)
        if more > 0:
            self.sums.frombytes(bytes(8 * more))
            self.weights.frombytes(bytes(8 * more))
            self.seen += bytes(more)

    def add(self, slot: int, op: str, value: float, weight: float, scaled: Scaled | None = None) -> None:
        """One leaf: ``value`` times weight for a mean, the value itself for every other op."""
        if scaled is None and not math.isfinite(value):
            self.nonfinite.add(slot)
            if self._skip:
                return
        if op in ("min", "max"):
            self.sums[slot] = extreme(op, self.sums[slot], value) if self.seen[slot] else value
        elif scaled is not None:
            self._add_exactly(slot, as_fraction(scaled))
        else:
            self._add_to_sum(slot, value)
        self.seen[slot] = 1
        self.weights[slot] += weight

    def _add_to_sum(self, slot: int, value: float) -> None:
        before = self.sums[slot]
        after = before + value
        if math.isfinite(after) or not math.isfinite(before) or not math.isfinite(value):
            self.sums[slot] = after
        else:
            self._add_exactly(slot, Fraction(value))

    def _add_exactly(self, slot: int, value: Fraction) -> None:
        self.exact[slot] = self.exact.get(slot, Fraction(0)) + value

    def add_rows(self, slots: Sequence[int], values: torch.Tensor, weights: array[float]) -> float:
        """Many adds of plain means at once: ``values`` [adds, slots], float64; ``weights``: one per add, positive.

        Returns the total weight.
        """
        by_row = torch.frombuffer(weights, dtype=torch.float64)
        total = by_row.sum().item()
        sums = by_row @ values
        if math.isfinite(sums.sum().item()) and by_row.min().item() >= 1:
            self._add_columns(slots, sums, total)
            return total
        # A product that overflows or is not finite, or one that is too small to have all of its bits.
        tiny = ((values * by_row.unsqueeze(1)).abs() < SMALLEST) & (values != 0)
        odd = ~sums.isfinite() | tiny.any(0)
        for column in odd.nonzero().flatten().tolist():
            for value, weight in zip(values[:, column].tolist(), weights, strict=True):
                summed, _, _, scaled = weigh(value, weight, None)
                self.add(slots[column], "mean", summed, weight, scaled)
        plain = (~odd).nonzero().flatten()
        if len(plain):
            self._add_columns([slots[column] for column in plain.tolist()], sums[plain], total)
        return total

    def _add_columns(self, slots: Sequence[int], sums: torch.Tensor, weight: float) -> None:
        """Sums of finite products."""
        places = _places(slots)
        mine = torch.frombuffer(self.sums, dtype=torch.float64)
        after = mine[places] + sums
        if math.isfinite(after.sum().item()):
            mine[places] = after
        else:
            for slot, value in zip(slots, sums.tolist(), strict=True):
                self._add_to_sum(slot, value)
        torch.frombuffer(self.weights, dtype=torch.float64)[places] += weight
        torch.frombuffer(self.seen, dtype=torch.uint8)[places] = 1


def _places(slots: Sequence[int]) -> slice | torch.Tensor:
    if isinstance(slots, range):
        return slice(slots.start, slots.stop)
    return torch.tensor(slots, dtype=torch.int64, device="cpu")


def extreme(op: str, one: float, other: float) -> float:
    """The smaller or the larger one; a NaN wins."""
    if math.isnan(one) or math.isnan(other):
        return math.nan
    return min(one, other) if op == "min" else max(one, other)
