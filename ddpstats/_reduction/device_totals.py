"""What one rank has added up so far on an accelerator, slot by slot, without a look at it from the host.

1. Leaves that are combined alike, with one dtype and shape, become one matrix [leaves, elements] (`Alike`).
2. A few operators turn it into what the leaves add to five lanes: sum, weight, how many values were not finite, how
   many count, and how many are wrong (a flag that is neither 0 nor 1, a negative weight: told when the lanes are read).
3. Minima, and negated maxima, have a lane of their own.

Values are masked where their weight is 0 before anything is multiplied. float64, but where the device has none.
What comes from host memory goes through pinned memory, so that nobody waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from ddpstats.errors import ConfigError

SUM, WEIGHT, NONFINITE, SEEN, WRONG, LEAST = range(6)
_ADDED = 5  # lanes that are added up

Numbers = torch.Tensor | Sequence[float]
"""Of one leaf: a tensor of any real dtype, or what was read in host memory."""


class Alike(NamedTuple):
    """Leaves of one reduce op whose values have one dtype and shape, and their weights, too.

    ``op`` "weight" is the weight of the whole call. ``weights``: one per leaf, or one for all.
    """

    op: str
    slots: Sequence[int]
    values: Sequence[Numbers]
    weights: Sequence[Numbers]


class Update(NamedTuple):
    """What one add does to the lanes; the lanes are as they were until `DeviceTotals.apply`."""

    slots: Sequence[int]
    added: torch.Tensor
    least: torch.Tensor | None


class DeviceTotals:
    """The lanes of one device. ``skip``: what is not finite is left out, and only counted."""

    def __init__(self, device: torch.device, skip: bool) -> None:
        self._device, self._skip = device, skip
        self._wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        self.lanes = self._empty(0)
        self._stream: Any = None

    def __deepcopy__(self, memo: object) -> DeviceTotals:
        """In the order of the adds, and without a wait for the device."""
        self._follow_stream()
        made = DeviceTotals(self._device, self._skip)
        made.lanes, made._stream = self.lanes.clone(), self._stream
        return made

    def __reduce__(self) -> NoReturn:
        raise ConfigError(f"a StatsWindow that added up on {self._device} cannot go to another process; flush first")

    def _empty(self, count: int) -> torch.Tensor:
        lanes = torch.zeros(_ADDED + 1, count, dtype=self._wide, device=self._device)
        lanes[LEAST] = math.inf
        return lanes

    def prepare(self, alike: Sequence[Alike]) -> Update:
        """What these leaves add; nothing changes yet."""
        self._follow_stream()
        parts = [self._part(one) for one in alike]
        slots: Sequence[int] = alike[0].slots if len(alike) == 1 else [slot for one in alike for slot in one.slots]
        added = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts], 1)
        least = None
        if any(found is not None for _, found in parts):
            filled = [torch.full_like(part[0], math.inf) if found is None else found for part, found in parts]
            least = torch.cat(filled)
        return Update(slots, added, least)

    def apply(self, update: Update, count: int) -> None:
        """Take it in; there are slots below ``count`` by now."""
        if self.lanes.shape[1] < count:
            self.lanes = torch.cat([self.lanes, self._empty(count - self.lanes.shape[1])], 1)
        slots = update.slots
        if isinstance(slots, range):
            mine = self.lanes[:, slots.start : slots.stop]
            mine[:_ADDED] += update.added
            if update.least is not None:
                mine[LEAST] = torch.minimum(mine[LEAST], update.least)
            return
        places = self._from_host(list(slots), torch.int64)
        self.lanes[:_ADDED].index_add_(1, places, update.added)
        if update.least is not None:
            self.lanes[LEAST, places] = torch.minimum(self.lanes[LEAST, places], update.least)

    # -- one set of leaves that are alike -----------------------------------------------------------------------------

    def _part(self, alike: Alike) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The five lanes [5, leaves], and minima or negated maxima [leaves]."""
        values = self._matrix(alike.values)
        if alike.op in ("mean", "weight"):
            sums, weights, wrong = self._weighted(values, self._matrix(alike.weights))
            if alike.op == "weight":
                sums = torch.zeros_like(sums)
        else:
            sums, wrong = _combined(alike.op, values)
            weights = torch.ones_like(sums)
        finite = sums.isfinite()
        counted = finite if self._skip else torch.ones_like(finite)
        least = None
        if alike.op in ("min", "max"):
            least, sums = sums.where(counted, math.inf), torch.zeros_like(sums)
        lanes = [sums.where(counted, 0.0), weights.where(counted, 0.0), ~finite, counted, wrong]
        return torch.stack([lane.to(self._wide).expand(len(alike.slots)) for lane in lanes]), least

    def _weighted(self, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(sum of value times weight, weight, whether a weight is none) of each leaf."""
        wrong = ~((weights >= 0) & (weights < math.inf)).all(1)
        total = weights.sum(1)
        if values.shape[1] == 1:
            weights = total.unsqueeze(1)
        products = (values * weights).where(weights > 0, 0.0)
        return products.sum(1), total, wrong | ~(total < math.inf)

    def _matrix(self, numbers: Sequence[Numbers]) -> torch.Tensor:
        """[leaves, elements]"""
        tensors = [one for one in numbers if isinstance(one, torch.Tensor)]
        if not tensors:
            return self._from_host([list(one) for one in numbers if not isinstance(one, torch.Tensor)], self._wide)
        plain = [_plain(one, self._device) for one in tensors] if _are_odd(tensors, self._device) else tensors
        return torch.stack(plain).reshape(len(plain), -1).to(self._wide)

    def _from_host(self, numbers: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """A copy that is not waited for."""
        pin = self._device.type == "cuda"
        host = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pin)
        return host.to(self._device, non_blocking=True)

    def _follow_stream(self) -> None:
        """Adds may come from different streams: the lanes are changed in the order of the adds."""
        if self._device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError("StatsWindow.add while a CUDA graph is captured: only its replays compute. Add outside.")
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def _combined(op: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(one number of each leaf, whether it is none); of a maximum the negated one."""
    wrong = torch.zeros_like(values[:, 0] if values.shape[1] else values.sum(1), dtype=torch.bool)
    if op == "sum":
        return values.sum(1), wrong
    if op in ("min", "max"):
        return values.amin(1) if op == "min" else -values.amax(1), wrong
    flags = values != 0
    return (flags.any(1) if op == "any" else flags.all(1)).to(values.dtype), (flags & (values != 1)).any(1)


def _are_odd(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    """All of them are alike: the first one tells."""
    first = tensors[0]
    return first.device != device or first.is_quantized or first.layout is not torch.strided


def _plain(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.detach().to(device, non_blocking=True)
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor
