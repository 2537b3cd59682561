"""Sums of products that a float64 cannot hold: as fractions, which are exact, or with an exponent of their own."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from fractions import Fraction

# A product below it has lost bits, or is zero although neither factor is.
SMALLEST = sys.float_info.min
# From here on a sum over ranks may overflow on its way, and then hide a real infinity of the other sign.
LARGEST = 2.0**1000

Scaled = tuple[float, int]
"""A mantissa and an exponent: mantissa times 2 to the exponent, with the precision of a float64."""


def scaled_sum(pairs: Iterable[tuple[float, float]]) -> Scaled:
    """The sum of value times weight. All must be finite."""
    return scaled(sum((Fraction(value) * Fraction(weight) for value, weight in pairs), Fraction(0)))


def scaled(total: Fraction) -> Scaled:
    """Rounded to the precision of a float64."""
    exponent = total.numerator.bit_length() - total.denominator.bit_length()
    return float(total / Fraction(2) ** exponent), exponent


def as_fraction(value: Scaled) -> Fraction:
    """Exactly."""
    return Fraction(value[0]) * Fraction(2) ** value[1]


def total(values: Iterable[Fraction]) -> float:
    """The sum, rounded; infinite where that is too large."""
    found = sum(values, Fraction(0))
    return _rounded(found, math.inf)


def mean(sums: Iterable[Fraction], weights: Iterable[float]) -> float:
    """The sum of ``sums`` divided by that of ``weights``, rounded; NaN where that is 0."""
    divisor = sum(map(Fraction, weights), Fraction(0))
    # A mean is not larger than its largest value; only that the sums were rounded can make it so.
    return _rounded(sum(sums, Fraction(0)) / divisor, sys.float_info.max) if divisor else math.nan


def _rounded(value: Fraction, largest: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return largest if value > 0 else -largest
