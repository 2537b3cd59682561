"""Layer 1 on one rank: the values of a step's checkpoints, judged, and logged.

1. Gradients leave a value each at the checkpoints (`_checkpoints`), on the device, and nobody waits for it.
2. `Thresholds.look` judges all values of the step (`_detectors`): one vector of values per micro-batch, and per further
   call of a module in it. One tensor is read, once, and a GradScaler's scale besides.
3. The memory of the detector is as before until `Thresholds.learn`: a step that is not applied is not learnt from.

A GradScaler multiplies the loss, and with it every gradient, so values are divided by its scale. Where a gradient is
not finite then, the scaler leaves the step out and takes a smaller scale, as it has to: that is no alarm, unless it
goes on for `_MOST_SKIPS` steps. float16 without a scaler that is known here has a scale nobody knows: the layer is off,
and says so.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ddpstats.sentinel._alarms import Check, error_line, info_lines, warning_line
from ddpstats.sentinel._checkpoints import Checkpoints, Selector, Values
from ddpstats.sentinel._detectors import ERROR, NORMAL, RULES, State
from ddpstats.sentinel._settings import SentinelSettings

_logger = logging.getLogger("ddpstats")

_KEPT_ORDERS = 64
_MOST_SKIPS = 16  # from the scale that a GradScaler begins with down to 1
_SILENT_STEPS = 3


class Thresholds:
    """Judges this rank's values. Local.

    Args:
        module: inside any DistributedDataParallel.
        selection: of checkpoints, as `Checkpoints`.
        rank: this one, global; for the lines.
        scale: of the GradScaler, now; None where there is none, or it is off.

    Attributes:
        checkpoints: where values come from.
    """

    def __init__(
        self,
        module: nn.Module,
        selection: Sequence[Selector] | None,
        settings: SentinelSettings,
        rank: int,
        scale: Callable[[], float | None],
    ) -> None:
        self._settings, self._rank, self._scale = settings, rank, scale
        self._rule = RULES[settings.detector]
        self.checkpoints = Checkpoints(module, selection, self._value_of)
        self._state: State | None = None
        self._next: State | None = None
        self._places: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._has_float16 = False
        self._is_off = False
        self._skips = 0  # steps in a row that the GradScaler left out
        self._silent = 0  # steps without any value, from the first one on

    def look(self, step: int) -> list[Check]:
        """What is not normal in this step, in the order of the backward pass; in mode 3 every check.

        Reads one tensor from the device, and with a GradScaler its scale, too.
        """
        micro_batches = self.checkpoints.take()
        scale = self._scale()
        if self._is_off or self._lacks_scale(scale):
            return []
        state, tables, where = self._state, list[Tensor](), list[tuple[int, tuple[int, ...]]]()
        for micro, values in enumerate(micro_batches):
            for indices, column in _calls(values):
                _, state, table = self._judged(indices, column, state, scale)
                tables.append(table)
                where.append((micro, indices))
        self._next = state
        self._notice_silence(bool(tables))
        if not tables:
            return []
        rows: list[list[list[float]]] = torch.stack(tables).tolist()
        checks = self._checks(step, rows, where, is_scaled=scale is not None)
        self._skips = self._skips + 1 if any(not math.isfinite(check.value) for check in checks) else 0
        gives_up = self._skips >= _MOST_SKIPS
        return [_as_error(check) if gives_up else check for check in checks if gives_up or not _is_skipped(check)]

    def is_abnormal(self, values: Values) -> bool:
        """Whether any of these, of a step that was run once more, is of level 1. Local."""
        state, scale = self._state, self._scale()
        for indices, column in _calls(values):
            levels, state, _ = self._judged(indices, column, state, scale)
            if bool((levels == ERROR).any()):
                return True
        return False

    def learn(self) -> None:
        """The step that `look` saw is applied: its values are part of the past."""
        if self._next is not None:
            self._state, self._next = self._next, None

    def forget(self) -> None:
        """The step that `look` saw is not applied."""
        self._next = None

    def log(self, checks: Sequence[Check]) -> None:
        """Lines of `look`'s checks; where an error stops the training, none comes after the first one."""
        for check in checks:
            if check.level == ERROR:
                _logger.error("%s", error_line(check, self._settings))
                if self._settings.mode >= 2:
                    return
            elif check.level == NORMAL:
                for line in info_lines(check, self._settings):
                    _logger.info("%s", line)
            else:
                _logger.warning("%s", warning_line(check, self._settings))

    def _value_of(self, gradient: Tensor) -> Tensor:
        if gradient.dtype == torch.float16:
            self._has_float16 = True
        return self._rule.value_of(gradient)

    def _notice_silence(self, has_values: bool) -> None:
        """Once: a sentinel that sees nothing must not look like one that finds nothing."""
        if has_values or self._silent < 0:
            self._silent = -1
            return
        self._silent += 1
        if self._silent == _SILENT_STEPS:
            warnings.warn(
                f"Sentinel: no checkpoint has given a value in the first {_SILENT_STEPS} steps on this rank. Is the "
                "model compiled (inside torch.compile there are no checkpoints), is step() called after backward(), "
                "and does micro_batch() go around it?",
                stacklevel=2,
            )

    def _lacks_scale(self, scale: float | None) -> bool:
        if (self._has_float16 or self.checkpoints.in_float16) and scale is None and not self._is_off:
            self._is_off = True
            warnings.warn(
                "Sentinel: gradients are float16, or of an autocast to it, and there is no enabled scaler=, so their "
                "scale is not known: the thresholds are off on this rank. Pass the GradScaler, or train in bfloat16 or "
                "float32.",
                stacklevel=2,
            )
        return self._is_off

    def _judged(
        self, indices: tuple[int, ...], column: list[Tensor], state: State | None, scale: float | None
    ) -> tuple[Tensor, State, Tensor]:
        """Levels, the memory afterwards, and the table of one value each of some checkpoints."""
        device = column[0].device
        state = state or self._rule.fresh(len(self.checkpoints.names), device)
        device = state[0].device
        values, seen = self._spread(indices, column, device)
        if scale is not None:
            values = values / (scale if self._settings.detector == "v2" else scale * scale)
            seen = seen & values.isfinite()
        levels, after = self._rule.check(values, seen, state, self._settings)
        return levels, after, self._rule.table(values, levels, state)

    def _spread(self, indices: tuple[int, ...], column: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """One value per checkpoint, and which of them there are."""
        known = self._places.get(indices)
        if known is None:
            if len(self._places) >= _KEPT_ORDERS:  # layers that are left out at random
                self._places.clear()
            places = torch.tensor(indices, device=device)
            seen = torch.zeros(len(self.checkpoints.names), dtype=torch.bool, device=device)
            known = self._places[indices] = places, seen.index_fill(0, places, True)
        try:
            stacked = torch.stack(column)
        except RuntimeError:  # a model on several devices
            stacked = torch.stack([value.to(device, non_blocking=True) for value in column])
        values = torch.zeros(len(self.checkpoints.names), device=device)
        return values.index_copy_(0, known[0], stacked.to(device)), known[1]

    def _checks(
        self, step: int, rows: list[list[list[float]]], where: list[tuple[int, tuple[int, ...]]], *, is_scaled: bool
    ) -> list[Check]:
        """Those that are to be heard of, and those that the GradScaler is to deal with: normal, and not finite."""
        everything = self._settings.mode == 3
        names, columns = self.checkpoints.names, self._rule.columns
        found = []
        for table, (micro, indices) in zip(rows, where, strict=True):
            for index in indices:
                value, *memory, checks, level = table[index]
                if level != NORMAL or everything or (is_scaled and not math.isfinite(value)):
                    state = dict(zip(columns[1:-2], memory, strict=True))
                    found.append(Check(self._rank, names[index], step, micro, int(level), value, state, int(checks)))
        return found


def _is_skipped(check: Check) -> bool:
    return check.level == NORMAL and not math.isfinite(check.value)


def _as_error(check: Check) -> Check:
    return replace(check, level=ERROR) if _is_skipped(check) else check


def _calls(values: Values) -> list[tuple[tuple[int, ...], list[Tensor]]]:
    """One entry for the first value of each checkpoint, one for the second values of those called twice, ..."""
    found: list[tuple[list[int], list[Tensor]]] = []
    times: dict[int, int] = {}
    for index, value in values:
        time = times[index] = times.get(index, -1) + 1
        if time == len(found):
            found.append(([], []))
        found[time][0].append(index)
        found[time][1].append(value)
    return [(tuple(indices), column) for indices, column in found]
