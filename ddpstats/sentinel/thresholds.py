"""Layer 1 on one rank: sizes of activation gradients, compared with thresholds, and logged.

1. `read_settings` reads mode, detector and thresholds: each from the first that is given of the argument, the
   ``DDPSTATS_SENTINEL_*`` variable, the ``NPU_ASD_*`` variable that MindSpore and torch_npu read, and the default. An
   empty variable does not count. A bad argument is an error. A bad variable is a warning, as in MindSpore, and says
   what is used instead: jobs that were started with it there start here, too.
2. Gradients leave a value each at the checkpoints (`activations`), on the device, and no thread waits for it.
3. `Thresholds` compares all values of the step with its memory of the steps before: one vector of values per
   micro-batch, and per further call of a module in it. One tensor is read, once, and a GradScaler's scale besides.
4. The memory stays as it is until `Thresholds.conclude`: a step that is not applied is not learned from.

A `Rule` is what a detector computes from n values at once, as pure functions of tensors. Values are float32, and so is
the arithmetic; everything stays on their device. A checkpoint without a value keeps its memory.

"v2" is the algorithm of CANN's SilentCheckV2 operator, which MindSpore's feature value detection and torch_npu use.
Where its documentation is silent: comparisons are strict, a jump counts upwards and downwards, and a value that is an
error does not widen the range, because a wide range hides the next error. "v3" is the algorithm that torch_npu (since
7.1) and MindSpore (since 2.7.1) run on the host. For "v2" the log lines are those of CANN's operator to the letter,
after a prefix that says which rank and which checkpoint: scripts that search device logs for them find these, too. For
"v3" they have the fields of the lines that torch_npu and MindSpore write.

A GradScaler multiplies the loss, and with it every gradient, so values are divided by its scale. Where a gradient is
not finite then, the scaler leaves the step out and takes a smaller scale, as it has to: that is no alarm, unless it
goes on for `_MOST_SKIPS` steps. float16 without a known scaler has an unknown scale: the layer is off, and says so.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddpstats._base.config import check_choice
from ddpstats._observe.gradients import unwrap
from ddpstats.errors import ConfigError
from ddpstats.sentinel.activations import Checkpoints, NumberedTensors
from ddpstats.sentinel.peer_replay import explain_alarm
from ddpstats.sentinel.verdict import Detector, Exam, SentinelFinding, SentinelVerdict, finding_of

if TYPE_CHECKING:
    from ddpstats.sentinel.sentinel import Setup

_logger = logging.getLogger("ddpstats")

ThresholdPair = tuple[float, float]
State = tuple[Tensor, ...]

NORMAL, ERROR, WARNING = 0, 1, 2

_MODES = (0, 1, 2, 3)
_MODE_NAMES = ("DDPSTATS_SENTINEL_MODE", "NPU_ASD_ENABLE")
_UPPER_NAMES = ("DDPSTATS_SENTINEL_UPPER_THRESH", "NPU_ASD_UPPER_THRESH")
_SIGMA_NAMES = ("DDPSTATS_SENTINEL_SIGMA_THRESH", "NPU_ASD_SIGMA_THRESH")
_SIGMA: ThresholdPair = (1e5, 5e3)
_SMALLEST, _LARGEST = 3.0, 3e38  # a larger number is infinity in float32
_PAIR = re.compile(r"\s*([+-]?\d+)\s*,\s*([+-]?\d+)\s*", re.ASCII)

_DECAY = 0.99
_MOST_SKIPS = 16  # from the scale that a GradScaler begins with down to 1
_MOST_SILENT = 3
_SILENCE = (
    f"no checkpoint has given a value in the first {_MOST_SILENT} steps on this rank. Is the model compiled (inside "
    "torch.compile there are no checkpoints), is step() called after backward(), and does micro_batch() go around it?"
)
_UNKNOWN_SCALE = (
    "gradients are float16, or of an autocast to it, and there is no enabled scaler=, so their scale is not known: the "
    "thresholds are off on this rank. Pass the GradScaler, or train in bfloat16 or float32."
)


@dataclass(frozen=True)
class SentinelSettings:
    """Mode, detector and thresholds, as `read_settings` read them.

    Attributes:
        mode: 0 off; 1 report and go on; 2 report and stop; 3 as 2, and report normal values, too.
        detector: "v2" compares an L2 norm with fixed thresholds, "v3" a squared maximum with its own average.
        upper_thresh: level 1 and level 2. For "v2" in the unit of the value; for "v3" multiples of the average.
        sigma_thresh: level 1 and level 2 of a jump, in widths of the range so far; "v3" does not use it.
        min_steps: the jump test of "v2" begins after so many checks; "v3" compares after so many normal values.
    """

    mode: int
    detector: str
    upper_thresh: ThresholdPair
    sigma_thresh: ThresholdPair
    min_steps: int


def read_settings(
    mode: int | None,
    detector: str,
    upper_thresh: ThresholdPair | None,
    sigma_thresh: ThresholdPair | None,
    environ: Mapping[str, str],
) -> tuple[SentinelSettings, list[str]]:
    """Return the settings that count, and a warning for each variable that is not used as it is written. Local.

    An argument that is None leaves its setting to ``environ`` (``os.environ``). Raises `ConfigError` for a bad one.
    """
    check_choice("detector", detector, list(RULES))
    rule, notes = RULES[detector], list[str]()

    def from_environ(names: Sequence[str], parse: Callable[[str], Any], default: Any, legal: str) -> Any:
        """Return what the first variable says that is set; the default, with a note, where ``parse`` returns None."""
        name, text = next(((name, environ[name].strip()) for name in names if environ.get(name, "").strip()), ("", ""))
        value = parse(text)
        if text and value is None:
            notes.append(f"{name}={text!r} is not {legal}: the default is used instead")
        return default if value is None else value

    if mode is None:
        modes = {str(number): number for number in _MODES}
        mode = from_environ(_MODE_NAMES, modes.get, None, f"one of {', '.join(modes)}")
        if mode is None:
            notes.append(f"the sentinel is off: pass mode=1, 2 or 3, or set {_MODE_NAMES[0]} to one of them")
            mode = 0
    elif type(mode) is not int or mode not in _MODES:
        raise ConfigError(f"mode={mode!r} is not understood; legal values: {', '.join(map(str, _MODES))}")
    legal = f"two integers with a comma between them, the first above the second and both at least {_SMALLEST:.0f}"
    if upper_thresh is None:
        upper_thresh = from_environ(_UPPER_NAMES, _pair_in, rule.upper_thresh, legal)
    if sigma_thresh is None:
        sigma_thresh = from_environ(_SIGMA_NAMES if detector == "v2" else (), _pair_in, _SIGMA, legal)
    upper, sigma = _check("upper_thresh", upper_thresh), _check("sigma_thresh", sigma_thresh)
    return SentinelSettings(mode, detector, upper, sigma, rule.min_steps), notes


def _pair_in(text: str) -> ThresholdPair | None:
    match = _PAIR.fullmatch(text)
    first, second = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    return (first, second) if _LARGEST > first > second >= _SMALLEST else None


def _check(argument: str, pair: Any) -> ThresholdPair:
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(type(part) in (int, float) for part in pair)
    if not is_pair or not _LARGEST > pair[0] > pair[1] > 0:
        legal = f"two numbers above 0 and below {_LARGEST:g}, the first one larger"
        raise ConfigError(f"{argument}={pair!r} is not understood; legal values: {legal}")
    return float(pair[0]), float(pair[1])


# -- the detectors: pure functions of tensors -------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Rules of one detector. They serve any number of memories.

    Attributes:
        start: name -> what a checkpoint remembers before any check: "pre" is the last value, and "checks" counts; what
            begins with an integer is counted in float64.
        upper_thresh, min_steps: defaults of `SentinelSettings`.
        lines: level -> the log lines, as formats of the fields of `Check` and `SentinelSettings`.
        value_of: the value of a gradient of any shape and real floating dtype: 0-d float32 on its device; 0 if empty.
        compare: returns which values are an error, which a warning, and the new memory between "pre" and "checks".
    """

    start: Mapping[str, float]
    upper_thresh: ThresholdPair
    min_steps: int
    lines: Mapping[int, Sequence[str]]
    value_of: Callable[[Tensor], Tensor]
    compare: Callable[[Tensor, Tensor, State, SentinelSettings], tuple[Tensor, Tensor, State]]

    def fresh(self, n: int, device: torch.device | str) -> State:
        """Return the memory of n checkpoints before any check: tensors of length n."""
        return tuple(
            torch.full((n,), start, dtype=torch.float64 if isinstance(start, int) else torch.float32, device=device)
            for start in self.start.values()
        )

    def check(self, values: Tensor, seen: Tensor, state: State, settings: SentinelSettings) -> tuple[Tensor, State]:
        """Compare n values with n memories. Return int8 levels, 0 where not ``seen``, and the new state.

        Args:
            values: float32 ``[n]``, not negative; anything where not ``seen``.
            seen: bool ``[n]``: which checkpoints have a value.
            state: of `fresh` or of the last check; it is not changed.
        """
        error, warning, memory = self.compare(values, seen, state, settings)
        levels = torch.where(error, ERROR, warning.to(torch.int8) * WARNING) * seen
        return levels, (torch.where(seen, values, state[0]), *memory, state[-1] + seen)

    def table(self, values: Tensor, levels: Tensor, state: State) -> Tensor:
        """Return value, memory before the check, and level in float64 ``[n, ...]``. An empty range is shown as 0."""
        memory = [column.double().nan_to_num(0.0, 0.0, 0.0) for column in state[1:]]
        return torch.stack([values.double(), state[0].double(), *memory, levels.double()], dim=1)


def _l2_norm(gradient: Tensor) -> Tensor:
    # Halves are summed in float32: squares of bfloat16 lose their digits, those of float16 overflow.
    dtype = torch.float64 if gradient.dtype is torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=dtype).float()
    return norm


def _compare_v2(values: Tensor, seen: Tensor, state: State, settings: SentinelSettings) -> tuple[Tensor, Tensor, State]:
    """Compare with fixed thresholds, and the jump since the last value with the range of the past."""
    pre, low, high, checks = state
    spread = high - low
    # Nothing is a jump from nowhere, nor where the past has no width.
    jumps = (checks >= settings.min_steps) & (spread > 0) & (pre < math.inf)
    jump = torch.where(jumps, (values - pre).abs() / spread, 0)
    # The negation makes an error of NaN, too.
    error = ~(values <= settings.upper_thresh[0]) | (jump > settings.sigma_thresh[0])
    warning = (values > settings.upper_thresh[1]) | (jump > settings.sigma_thresh[1])
    learned = torch.where(seen & ~error, values, math.nan)  # which fmin and fmax pass over
    return error, warning, (torch.fmin(low, learned), torch.fmax(high, learned))


def _square_of_maximum(gradient: Tensor) -> Tensor:
    if gradient.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=gradient.device)
    low, high = torch.aminmax(gradient)  # a norm of order infinity is ten times slower on the CPU
    return torch.maximum(-low, high).to(torch.float32).square()


def _compare_v3(values: Tensor, seen: Tensor, state: State, settings: SentinelSettings) -> tuple[Tensor, Tensor, State]:
    """Compare with multiples of the moving average of normal values."""
    pre, average, normal, _ = state
    # The average began at 0: so much of it is there by now.
    filled = (1 - torch.pow(_DECAY, normal)).float()
    has_past = (normal >= settings.min_steps) & (average != 0)
    mean = torch.where(has_past, average / filled, math.inf)  # which nothing is a multiple of
    excess = torch.minimum(values, (values - pre).abs())  # a high value that stays is an error only once
    error = ~(values < math.inf) | (excess > mean * settings.upper_thresh[0])
    warning = values > mean * settings.upper_thresh[1]
    # A zero says nothing of the size of other values: the layer had no part in the loss.
    learned = seen & (values != 0) & ~(error | warning)
    average = torch.where(learned, average * _DECAY + values * (1 - _DECAY), average)
    return error, warning, (average, normal + learned)


_V2_VALUES = "val = [{value:f}], pre_val = [{pre:f}], min_val = [{min:f}], max_val = [{max:f}], step = [{checks:.0f}]"
_V2_CONSTANTS = (
    "c_min_steps = [{min_steps}], c_thresh_l1 = [{upper_thresh[0]:f}], c_coeff_l1 = [{sigma_thresh[0]:f}], "
    "c_thresh_l2 = [{upper_thresh[1]:f}], c_coeff_l2 = [{sigma_thresh[1]:f}]"
)
# The nine blanks, and no comma before the mode, are the operator's own.
_V2_ALARM = f"input message: {_V2_VALUES},         {_V2_CONSTANTS} npu_asd_detect = [{{mode}}]."
_V3_VALUES = (  # six significant digits: squares of gradients are far from 1
    "value [{value:g}], previous value [{pre:g}], history avg [{avg:g}], "
    "bp time [step {step}, micro-batch {micro_batch}], normal count [{normal:.0f}]."
)

RULES: Mapping[str, Rule] = {
    "v2": Rule(
        {"pre": 0.0, "min": math.inf, "max": -math.inf, "checks": 0},
        (1e6, 1e4),
        100,
        {
            NORMAL: [f"{_V2_VALUES}.", f"{_V2_CONSTANTS}, npu_asd_detect = [{{mode}}]"],
            ERROR: [f"SilentCheck get L1 Error, {_V2_ALARM}"],
            WARNING: [f"SilentCheck get L2 Warning, {_V2_ALARM}"],
        },
        _l2_norm,
        _compare_v2,
    ),
    "v3": Rule(
        {"pre": 0.0, "avg": 0.0, "normal": 0, "checks": 0},
        (1e6, 100.0),
        10,
        {
            NORMAL: [
                f"A value is normal: param name [{{checkpoint}}], {_V3_VALUES}",
                "upper_thresh1 = [{upper_thresh[0]:g}], upper_thresh2 = [{upper_thresh[1]:g}], "
                "min_steps = [{min_steps}], mode = [{mode}]",
            ],
            ERROR: [f"A grad-norm spike may happen: param name [{{checkpoint}}], abnormal {_V3_VALUES}"],
            WARNING: [f"A value is suspect, and not learnt from: param name [{{checkpoint}}], {_V3_VALUES}"],
        },
        _square_of_maximum,
        _compare_v3,
    ),
}


# -- one rank's checks, and what all ranks conclude -------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One value of a checkpoint, and the memory that it was compared with.

    Attributes:
        rank: global rank.
        checkpoint: name of the module.
        step: of the training; the first one is 0.
        micro_batch: of the step; the first one is 0.
        level: `NORMAL`, `ERROR` or `WARNING`.
        value: of the gradient there.
        state: name -> what was remembered before this check, as in `Rule.start`.
    """

    rank: int
    checkpoint: str
    step: int
    micro_batch: int
    level: int
    value: float
    state: Mapping[str, float]


def log_lines(check: Check, settings: SentinelSettings) -> list[str]:
    """Return the lines of one check: one of an error or a warning; two of a normal value, the last its constants."""
    fields = {**vars(check), **check.state, **vars(settings)}
    lines = RULES[settings.detector].lines[check.level]
    return [f"[rank {check.rank}] [{check.checkpoint}] {line.format(**fields)}" for line in lines]


def alarm_tree(errors: Sequence[Check]) -> dict[str, Any] | None:
    """Return the first error of this rank in words, for `gather_trees`; None without any."""
    if not errors:
        return None
    first, others = errors[0], len({check.checkpoint for check in errors}) - 1
    memory = ", ".join(f"{name} {value:g}" for name, value in first.state.items() if name != "checks")
    text = (
        f"{first.checkpoint}, micro-batch {first.micro_batch}: value {first.value:g} after "
        f"{first.state['checks']:.0f} checks ({memory})"
    )
    text += f"; {others} more checkpoints after it" if others else ""
    return {"name": first.checkpoint, "text": text, "value": first.value, "micro_batch": first.micro_batch}


def threshold_finding(trees: Mapping[int, dict[str, Any] | None]) -> SentinelFinding | None:
    """Return what all ranks conclude from `alarm_tree` of each."""
    abnormal = {rank: tree for rank, tree in trees.items() if tree is not None}
    more = ["All ranks see it: parameters, data or software first; one faulty device does not reach all at once."]
    what = "a gradient of an activation is far from normal, before any reduction of gradients"
    return finding_of("thresholds", what, abnormal, more if len(abnormal) == len(trees) > 1 else [])


class Thresholds(Detector):
    """Layer 1: compares this rank's values."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._settings = setup, setup.options
        self._rule = RULES[self._settings.detector]
        self._checkpoints = Checkpoints(unwrap(setup.model), setup.options.checkpoints, self._rule.value_of)
        self.warnings, names = self._checkpoints.warnings, self._checkpoints.names
        names_crc = zlib.crc32(repr(names).encode())
        self.same_on_all_ranks = {"checkpoints": f"{len(names)} (CRC-32 of their names {names_crc:08x})"}
        self._alarmed: frozenset[int] = frozenset()  # the ranks with an alarm in the step before
        self._state: State | None = None
        self._next: State | None = None
        self._skips = 0  # steps in a row that the GradScaler left out
        self._silent_steps: int | None = 0  # since the first step; None once a value came
        self._is_off = False

    def begin(self) -> None:
        self._checkpoints.begin()

    def end(self, failed: bool) -> None:
        self._checkpoints.end(failed)

    def suspicious(self, step: int) -> Any:
        """Return the first error, and log what is not normal; in mode 3 normal values, too."""
        checks = self._checks(step)
        for check in checks:
            level = {ERROR: logging.ERROR, WARNING: logging.WARNING, NORMAL: logging.INFO}[check.level]
            for line in log_lines(check, self._settings):
                _logger.log(level, "%s", line)
            if check.level == ERROR and self._settings.mode >= 2:
                break  # the training stops here
        return alarm_tree([check for check in checks if check.level == ERROR])

    def findings(self, exam: Exam) -> list[SentinelFinding]:
        finding, setup = threshold_finding(exam.evidence), self._setup
        before, self._alarmed = self._alarmed, frozenset(finding.culprit_ranks if finding else ())
        fresh = sorted(self._alarmed - before)
        if fresh and setup.reruns is not None:
            for detector in exam.detectors:
                detector.before_rerun()
            micro_batch = exam.evidence[fresh[0]]["micro_batch"]
            asked = (exam.gathered, setup.reruns, setup.ranks, setup.rank, fresh[0], micro_batch)
            note, exam.may_be_hardware = explain_alarm(*asked, self._has_error, self._checkpoints)
            exam.notes.append(note)
        return [] if finding is None else [finding]

    def conclude(self, verdict: SentinelVerdict | None) -> None:
        """Keep the memory of this step, unless it is not applied."""
        if verdict is not None and self._next is not None and (verdict.ok or self._settings.mode == 1):
            self._state = self._next
        self._next = None

    def close(self) -> None:
        self._checkpoints.close()

    def _checks(self, step: int) -> list[Check]:
        """Return what is not normal in this step, in the order of the backward pass; in mode 3 every check.

        Reads one tensor from the device, and with a GradScaler its scale, too.
        """
        micro_batches, scale = self._checkpoints.take(), self._setup.scale()
        if self._checkpoints.in_float16 and scale is None:
            if not self._is_off:
                warnings.warn(f"Sentinel: {_UNKNOWN_SCALE}", stacklevel=2)
            self._is_off = True
            return []
        self._next, rows = self._compare(micro_batches, scale)
        self._silent_steps = None if rows or self._silent_steps is None else self._silent_steps + 1
        if self._silent_steps == _MOST_SILENT:  # a sentinel that sees nothing must not look like one that finds nothing
            warnings.warn(f"Sentinel: {_SILENCE}", stacklevel=2)
        self._skips = 0 if all(math.isfinite(row[0]) for _, _, row in rows) else self._skips + 1
        checks = []
        for micro, index, (value, *memory, level) in rows:
            if level != NORMAL or (self._settings.mode == 3 and math.isfinite(value)):
                name, remembered = self._checkpoints.names[index], dict(zip(self._rule.start, memory, strict=True))
                checks.append(Check(self._setup.rank, name, step, micro, int(level), value, remembered))
        return checks

    def _has_error(self, values: NumberedTensors) -> bool:
        """Return whether any value of a rerun of this step is an error. Local."""
        return any(row[-1] == ERROR for _, _, row in self._compare([values], self._setup.scale())[1])

    def _compare(
        self, micro_batches: Sequence[NumberedTensors], scale: float | None
    ) -> tuple[State | None, list[tuple[int, int, list[float]]]]:
        """Return the memory afterwards; and of each value its micro-batch, checkpoint and table row."""
        state, count = self._state, len(self._checkpoints.names)
        tables, origins = list[Tensor](), list[tuple[int, dict[int, Tensor]]]()
        for micro, call in ((micro, call) for micro, values in enumerate(micro_batches) for call in _calls(values)):
            state = state or self._rule.fresh(count, next(iter(call.values())).device)
            device = state[0].device  # a model may be on several
            missing = torch.full((), -1.0, device=device)
            values = torch.stack([call.get(index, missing).to(device) for index in range(count)])
            seen = ~(values < 0)
            if scale is not None:
                values = values / (scale if self._settings.detector == "v2" else scale * scale)
                if self._skips < _MOST_SKIPS - 1:
                    seen = seen & values.isfinite()
            levels, after = self._rule.check(values, seen, state, self._settings)
            tables.append(self._rule.table(values, levels, state))
            origins.append((micro, call))
            state = after
        rows = torch.stack(tables).tolist() if tables else []
        return state, [(micro, i, table[i]) for table, (micro, call) in zip(rows, origins, strict=True) for i in call]


def _calls(values: NumberedTensors) -> list[dict[int, Tensor]]:
    """Return index -> value: of the first call of each checkpoint, of the second calls of those called twice, ..."""
    calls: list[dict[int, Tensor]] = []
    times: Counter[int] = Counter()
    for index, value in values:
        if times[index] == len(calls):
            calls.append({})
        calls[times[index]][index] = value
        times[index] += 1
    return calls
