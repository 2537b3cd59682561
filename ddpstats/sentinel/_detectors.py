"""What healthy values of a checkpoint look like: two detectors, as pure functions of tensors.

A checkpoint gives one value per check, a size of its gradient. A detector remembers a few numbers per checkpoint and
gives each value a level: 0 normal, 1 an error, 2 a warning. For n checkpoints at once:

1. `Rule.value_of` makes a 0-d value of a gradient, as it passes in the backward pass.
2. `Rule.check` compares n values with what is remembered, and returns levels and the new memory. The old memory stays
   as it is: a caller that stops there, or asks again, drops the new one. A checkpoint without a value keeps its memory.
3. `Rule.table` packs values, the memory they were compared with, and levels into one tensor, to be read at once.

Everything stays on the device of the values, and nothing here waits for it. Values are float32, and so is arithmetic.
Constants are 0-d tensors there, made once: on the CPU an operator takes twice as long with a number of Python.

``V2`` is the algorithm of CANN's SilentCheckV2 operator, which MindSpore's feature value detection and torch_npu use.
Where its documentation is silent: comparisons are strict, a jump counts upwards and downwards, and a value that is an
error does not widen the range, because a wide range hides the next error.

``V3`` is the algorithm that torch_npu (since 7.1) and MindSpore (since 2.7.1) run on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ddpstats.sentinel._settings import Detector, SentinelSettings

NORMAL, ERROR, WARNING = 0, 1, 2

State = tuple[Tensor, ...]

_DECAY = 0.99


class Rule(Protocol):
    """A detector. One object serves any number of memories."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What the columns of `table` are: "value", then the memory, then "checks" and "level"."""

    def value_of(self, gradient: Tensor) -> Tensor:
        """The value of a gradient of any shape and real floating dtype: 0-d float32 on its device; 0 where empty."""

    def fresh(self, n: int, device: torch.device | str) -> State:
        """The memory of n checkpoints before any check; tensors of length n."""

    def check(self, values: Tensor, seen: Tensor, state: State, settings: SentinelSettings) -> tuple[Tensor, State]:
        """Judge one value per checkpoint.

        Args:
            values: float32 ``[n]``, not negative; anything where not ``seen``.
            seen: bool ``[n]``: which checkpoints have a value.
            state: of `fresh` or of the last check; it is not changed.
            settings: their thresholds.

        Returns:
            int8 ``[n]`` levels, 0 where not ``seen``; and the new state.
        """

    def table(self, values: Tensor, levels: Tensor, state: State) -> Tensor:
        """float64 ``[n, len(columns)]``; ``state`` as it was before that check."""


class V2State(NamedTuple):
    """Per checkpoint: the last value, the range of all values, how many there were. The range begins empty."""

    pre: Tensor
    low: Tensor
    high: Tensor
    checks: Tensor


class V2:
    """An L2 norm, against fixed thresholds, and its jumps, against the range of its past."""

    columns = ("value", "pre", "min", "max", "checks", "level")

    def value_of(self, gradient: Tensor) -> Tensor:
        norm: Tensor
        if gradient.dtype is torch.float32:
            norm = torch.linalg.vector_norm(gradient)
        elif gradient.dtype is torch.float64:
            norm = torch.linalg.vector_norm(gradient).float()
        else:  # summed in float32: squares of bfloat16 lose their digits, those of float16 overflow
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        return norm

    def fresh(self, n: int, device: torch.device | str) -> V2State:
        low = torch.full((n,), math.inf, dtype=torch.float32, device=device)
        return V2State(pre=torch.zeros_like(low), low=low, high=-low, checks=_counts(n, device))

    def check(self, values: Tensor, seen: Tensor, state: State, settings: SentinelSettings) -> tuple[Tensor, V2State]:
        known = _constants(settings, values.device)
        pre, low, high, checks = state
        spread = high - low
        # Nothing is a jump from nowhere, nor where the past has no width.
        jumps = (checks >= known.min_steps) & (spread > known.zero) & (pre < known.infinity)
        jump = torch.where(jumps, (values - pre).abs() / spread, known.zero)
        # The negation makes an error of NaN, too.
        error = ~(values <= known.upper[0]) | (jump > known.sigma[0])
        warning = (values > known.upper[1]) | (jump > known.sigma[1])
        learnt = torch.where(seen & ~error, values, known.nan)  # which fmin and fmax pass over
        state = V2State(
            pre=torch.where(seen, values, pre),
            low=torch.fmin(low, learnt),
            high=torch.fmax(high, learnt),
            checks=checks + seen,
        )
        return _levels(error, warning, seen, known.levels), state

    def table(self, values: Tensor, levels: Tensor, state: State) -> Tensor:
        pre, low, high, checks = state
        empty = low > high  # shown as zeros, which the operator's own buffer begins with
        low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
        return _columns([values, pre, low, high], [checks, levels.double()])


class V3State(NamedTuple):
    """Per checkpoint: the last value, the moving average of normal values, how many of these, and of all."""

    pre: Tensor
    average: Tensor
    normal: Tensor
    checks: Tensor


class V3:
    """The square of the largest magnitude, against multiples of its own moving average."""

    columns = ("value", "pre", "avg", "normal", "checks", "level")

    def value_of(self, gradient: Tensor) -> Tensor:
        if gradient.numel() == 0:
            return torch.zeros((), dtype=torch.float32, device=gradient.device)
        low, high = torch.aminmax(gradient)  # a norm of order infinity is ten times slower on the CPU
        return torch.maximum(-low, high).to(torch.float32).square()

    def fresh(self, n: int, device: torch.device | str) -> V3State:
        pre = torch.zeros(n, dtype=torch.float32, device=device)
        return V3State(pre=pre, average=pre, normal=_counts(n, device), checks=_counts(n, device))

    def check(self, values: Tensor, seen: Tensor, state: State, settings: SentinelSettings) -> tuple[Tensor, V3State]:
        known = _constants(settings, values.device)
        pre, average, normal, checks = state
        # The average began at 0: so much of it is there by now.
        filled = (known.whole - torch.pow(known.decay, normal)).float()
        judged = (normal >= known.min_steps) & (average != known.zero)
        mean = torch.where(judged, average / filled, known.infinity)  # which nothing is a multiple of
        excess = torch.minimum(values, (values - pre).abs())  # a high value that stays is an error only once
        error = ~(values < known.infinity) | (excess > mean * known.upper[0])
        warning = values > mean * known.upper[1]
        # A zero says nothing of the size of other values: the layer had no part in the loss.
        learnt = seen & (values != known.zero) & ~(error | warning)
        state = V3State(
            pre=torch.where(seen, values, pre),
            average=torch.where(learnt, average * known.old + values * known.new, average),
            normal=normal + learnt,
            checks=checks + seen,
        )
        return _levels(error, warning, seen, known.levels), state

    def table(self, values: Tensor, levels: Tensor, state: State) -> Tensor:
        pre, average, normal, checks = state
        return _columns([values, pre, average], [normal, checks, levels.double()])


RULES: Mapping[Detector, Rule] = {"v2": V2(), "v3": V3()}


class _Constants(NamedTuple):
    """Numbers, as 0-d tensors."""

    upper: list[Tensor]
    sigma: list[Tensor]
    zero: Tensor
    infinity: Tensor
    nan: Tensor
    old: Tensor
    new: Tensor
    min_steps: Tensor
    decay: Tensor
    whole: Tensor
    levels: list[Tensor]


@functools.lru_cache(maxsize=16)
def _constants(settings: SentinelSettings, device: torch.device) -> _Constants:
    def single(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=device)

    def double(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=device)

    def limit(value: float) -> Tensor:  # nothing is above infinity, which a large number would become
        return single(min(value, torch.finfo(torch.float32).max))

    return _Constants(
        upper=[limit(one) for one in settings.upper],
        sigma=[limit(one) for one in settings.sigma],
        zero=single(0.0),
        infinity=single(math.inf),
        nan=single(math.nan),
        old=single(_DECAY),
        new=single(1 - _DECAY),
        min_steps=double(settings.min_steps),
        decay=double(_DECAY),
        whole=double(1.0),
        levels=[torch.tensor(level, dtype=torch.int8, device=device) for level in (NORMAL, ERROR, WARNING)],
    )


def _counts(n: int, device: torch.device | str) -> Tensor:
    """Zeros; whole numbers in float64, as `Rule.table` wants them."""
    return torch.zeros(n, dtype=torch.float64, device=device)


def _levels(error: Tensor, warning: Tensor, seen: Tensor, levels: list[Tensor]) -> Tensor:
    level = torch.where(error, levels[ERROR], torch.where(warning, levels[WARNING], levels[NORMAL]))
    return torch.where(seen, level, levels[NORMAL])


def _columns(singles: list[Tensor], doubles: list[Tensor]) -> Tensor:
    """Stacked by dtype first: tensors of several dtypes in one call cost three times as much."""
    return torch.cat([torch.stack(singles, dim=1).double(), torch.stack(doubles, dim=1)], dim=1)
