"""Mode, detector and thresholds of the sentinel: from arguments, environment variables and defaults. Pure.

1. Each setting has three places, and the first that holds it wins: the argument, the ``DDPSTATS_SENTINEL_*`` variable,
   the ``NPU_ASD_*`` variable that MindSpore and torch_npu read. An empty variable holds nothing.
2. A bad argument is an error: somebody is there to read it.
3. A bad variable is a warning, as in MindSpore, and says what is used instead: jobs that were started with it there
   start here, too. A bad mode turns the sentinel off; bad thresholds fall back to the default, both of them.
4. Thresholds in a variable are two integers ``first,second``. What is below 3 becomes 3; then the first one has to be
   the larger one.

What healthy values of a checkpoint look like: two detectors, as pure functions of tensors.

A checkpoint gives one value per check, a size of its gradient. A detector remembers a few numbers per checkpoint and
gives each value a level: 0 normal, 1 an error, 2 a warning. For n checkpoints at once:

1. `Rule.value_of` makes a 0-d value of a gradient, as it passes in the backward pass.
2. `Rule.check` compares n values with what is remembered, and returns levels and the new memory. The old memory stays
   as it is: a caller that stops there, or asks again, drops the new one. A checkpoint without a value keeps its memory.
3. `Rule.table` packs values, the memory they were compared with, and levels into one tensor, to be read at once.

Everything stays on the device of the values, and nothing here waits for it. Values are float32, and so is arithmetic.

``V2`` is the algorithm of CANN's SilentCheckV2 operator, which MindSpore's feature value detection and torch_npu use.
Where its documentation is silent: comparisons are strict, a jump counts upwards and downwards, and a value that is an
error does not widen the range, because a wide range hides the next error.

``V3`` is the algorithm that torch_npu (since 7.1) and MindSpore (since 2.7.1) run on the host.

Values that are not normal: lines in the log, what ranks tell each other of them, and what that comes to. Pure.

For the detector "v2" the lines are those of CANN's SilentCheckV2 operator to the letter, after a prefix that says which
rank and which checkpoint: scripts that search device logs for them find these, too. For "v3" they have the fields of
the lines that torch_npu and MindSpore write.

Layer 1 on one rank: the values of a step's checkpoints, judged, and logged.

1. Gradients leave a value each at the checkpoints (`activations`), on the device, and nobody waits for it.
2. `Thresholds.look` judges all values of the step: one vector of values per micro-batch, and per further
   call of a module in it. One tensor is read, once, and a GradScaler's scale besides.
3. The memory of the detector is as before until `Thresholds.conclude`: a step that is not applied is not learnt from.

A GradScaler multiplies the loss, and with it every gradient, so values are divided by its scale. Where a gradient is
not finite then, the scaler leaves the step out and takes a smaller scale, as it has to: that is no alarm, unless it
goes on for `_MOST_SKIPS` steps. float16 without a scaler that is known here has a scale nobody knows: the layer is off,
and says so.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args

import torch
from torch import Tensor

from ddpstats._base.config import SENTINEL_MODE, SENTINEL_SIGMA_THRESH, SENTINEL_UPPER_THRESH, check_choice
from ddpstats._rerun.run import Reruns
from ddpstats.errors import ConfigError
from ddpstats.sentinel.activations import Checkpoints, Values
from ddpstats.sentinel.peer_replay import explain_alarm
from ddpstats.sentinel.verdict import Detector, Exam, SentinelFinding, SentinelVerdict, finding_of

Algorithm = Literal["v2", "v3"]
Pair = tuple[float, float]

_MODE_NAMES = (SENTINEL_MODE, "NPU_ASD_ENABLE")
_UPPER_NAMES = (SENTINEL_UPPER_THRESH, "NPU_ASD_UPPER_THRESH")
_SIGMA_NAMES = (SENTINEL_SIGMA_THRESH, "NPU_ASD_SIGMA_THRESH")

_MODES = (0, 1, 2, 3)
_UPPER: Mapping[Algorithm, Pair] = {"v2": (1e6, 1e4), "v3": (1e6, 100.0)}
_SIGMA: Pair = (1e5, 5e3)
_MIN_STEPS: Mapping[Algorithm, int] = {"v2": 100, "v3": 10}
_SMALLEST = 3.0

_INTEGER = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)


@dataclass(frozen=True)
class SentinelSettings:
    """What `read_settings` found.

    Attributes:
        mode: 0 off; 1 report and go on; 2 report and stop; 3 as 2, and report normal values, too.
        detector: "v2" judges an L2 norm by fixed thresholds, "v3" a squared maximum by multiples of its own average.
        upper: level 1 and level 2. For "v2" in the unit of the value; for "v3" multiples of the average.
        sigma: level 1 and level 2 of a jump, in widths of the range seen so far; of no use to "v3".
        min_steps: the jump test of "v2" begins after so many checks; "v3" judges after so many normal values.
    """

    mode: int
    detector: Algorithm
    upper: Pair
    sigma: Pair
    min_steps: int = 100


def read_settings(
    mode: int | None,
    detector: str,
    upper_thresh: Pair | None,
    sigma_thresh: Pair | None,
    environ: Mapping[str, str],
) -> tuple[SentinelSettings, tuple[str, ...]]:
    """The settings that count, and a warning for each variable that is not used as it stands. Local.

    Args:
        mode: 0 to 3; None: as the environment says.
        detector: "v2" or "v3".
        upper_thresh: two numbers above 0, the first one larger; None: as the environment says.
        sigma_thresh: likewise; looked at, and then not used, where ``detector`` is "v3".
        environ: ``os.environ``, or what is to stand in its place.

    Raises:
        ConfigError: an argument is none of these.
    """
    check_choice("detector", detector, get_args(Algorithm))
    kind = cast(Algorithm, detector)
    warnings: list[str] = []
    sigma_names = _SIGMA_NAMES if kind == "v2" else ()
    settings = SentinelSettings(
        mode=_mode(mode, environ, warnings),
        detector=kind,
        upper=_thresholds("upper_thresh", upper_thresh, _UPPER_NAMES, _UPPER[kind], environ, warnings),
        sigma=_thresholds("sigma_thresh", sigma_thresh, sigma_names, _SIGMA, environ, warnings),
        min_steps=_MIN_STEPS[kind],
    )
    return settings, tuple(warnings)


def _mode(given: object, environ: Mapping[str, str], warnings: list[str]) -> int:
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int) or given not in _MODES:
            raise ConfigError(f"mode={given!r} is not understood; legal values: {', '.join(map(str, _MODES))}")
        return given
    name, text = _first_set(_MODE_NAMES, environ)
    if name is None:
        warnings.append(
            f"no mode is set: the sentinel is off; pass mode=1, 2 or 3, or set {SENTINEL_MODE} to one of them"
        )
        return 0
    number = float(text) if _INTEGER.fullmatch(text) else math.nan
    if number not in _MODES:
        warnings.append(f"{name}={text!r} is not one of 0, 1, 2 and 3: 0 is used, so the sentinel is off")
        return 0
    return int(number)


def _thresholds(
    argument: str,
    given: object,
    names: tuple[str, ...],
    default: Pair,
    environ: Mapping[str, str],
    warnings: list[str],
) -> Pair:
    if given is not None:
        return _checked(argument, given)
    name, text = _first_set(names, environ)
    if name is None:
        return default
    found, trouble = _parsed(text, default)
    if trouble:
        warnings.append(f"{name}={text!r}: {trouble}; {found[0]:.0f},{found[1]:.0f} is used instead")
    return found


def _first_set(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str | None, str]:
    for name in names:
        text = environ.get(name, "").strip()
        if text:
            return name, text
    return None, ""


def _parsed(text: str, default: Pair) -> tuple[Pair, str]:
    """The thresholds, and what is wrong with ``text``; nothing is where that is empty."""
    parts = text.split(",")
    if len(parts) != 2 or not all(_INTEGER.fullmatch(part) for part in parts):
        return default, "these are not two integers with a comma between them"
    written = (float(parts[0]), float(parts[1]))
    if math.inf in written:
        return default, "this is too large"
    first, second = max(written[0], _SMALLEST), max(written[1], _SMALLEST)
    if not first > second:
        return default, f"the first threshold must be above the second one, and both at least {_SMALLEST:.0f}"
    return (first, second), "" if (first, second) == written else f"a threshold is at least {_SMALLEST:.0f}"


def _checked(argument: str, given: Any) -> Pair:
    try:
        first, second = given
        if isinstance(first, (bool, str)) or isinstance(second, (bool, str)):
            raise TypeError
        pair = (float(first), float(second))
    except (TypeError, ValueError, OverflowError):
        pair = (math.nan, math.nan)
    if not math.inf > pair[0] > pair[1] > 0:
        raise ConfigError(
            f"{argument}={given!r} is not understood; legal values: two finite numbers above 0, the first one larger"
        )
    return pair


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
        pre, low, high, checks = state
        spread = high - low
        # Nothing is a jump from nowhere, nor where the past has no width.
        jumps = (checks >= settings.min_steps) & (spread > 0) & (pre < math.inf)
        jump = torch.where(jumps, (values - pre).abs() / spread, 0)
        # The negation makes an error of NaN, too.
        error = ~(values <= _limit(settings.upper[0])) | (jump > _limit(settings.sigma[0]))
        warning = (values > _limit(settings.upper[1])) | (jump > _limit(settings.sigma[1]))
        learnt = torch.where(seen & ~error, values, math.nan)  # which fmin and fmax pass over
        state = V2State(
            pre=torch.where(seen, values, pre),
            low=torch.fmin(low, learnt),
            high=torch.fmax(high, learnt),
            checks=checks + seen,
        )
        return _levels(error, warning, seen), state

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
        pre, average, normal, checks = state
        # The average began at 0: so much of it is there by now.
        filled = (1 - torch.pow(_DECAY, normal)).float()
        judged = (normal >= settings.min_steps) & (average != 0)
        mean = torch.where(judged, average / filled, math.inf)  # which nothing is a multiple of
        excess = torch.minimum(values, (values - pre).abs())  # a high value that stays is an error only once
        error = ~(values < math.inf) | (excess > mean * _limit(settings.upper[0]))
        warning = values > mean * _limit(settings.upper[1])
        # A zero says nothing of the size of other values: the layer had no part in the loss.
        learnt = seen & (values != 0) & ~(error | warning)
        state = V3State(
            pre=torch.where(seen, values, pre),
            average=torch.where(learnt, average * _DECAY + values * (1 - _DECAY), average),
            normal=normal + learnt,
            checks=checks + seen,
        )
        return _levels(error, warning, seen), state

    def table(self, values: Tensor, levels: Tensor, state: State) -> Tensor:
        pre, average, normal, checks = state
        return _columns([values, pre, average], [normal, checks, levels.double()])


RULES: Mapping[Algorithm, Rule] = {"v2": V2(), "v3": V3()}


def _limit(threshold: float) -> float:
    """Nothing is above infinity, which a large number would become in float32."""
    return min(threshold, torch.finfo(torch.float32).max)


def _counts(n: int, device: torch.device | str) -> Tensor:
    """Zeros; whole numbers in float64, as `Rule.table` wants them."""
    return torch.zeros(n, dtype=torch.float64, device=device)


def _levels(error: Tensor, warning: Tensor, seen: Tensor) -> Tensor:
    return torch.where(error, ERROR, warning.to(torch.int8) * WARNING) * seen


def _columns(singles: list[Tensor], doubles: list[Tensor]) -> Tensor:
    """Stacked by dtype first: tensors of several dtypes in one call cost three times as much."""
    return torch.cat([torch.stack(singles, dim=1).double(), torch.stack(doubles, dim=1)], dim=1)


@dataclass(frozen=True)
class Check:
    """One value of one checkpoint, and what it was compared with.

    Attributes:
        rank: global rank.
        checkpoint: name of the module.
        step: of the training; the first one is 0.
        micro_batch: of the step; the first one is 0.
        level: 0 normal, 1 an error, 2 a warning.
        value: of the gradient there.
        state: what was remembered before this check. For "v2" ``pre``, ``min`` and ``max``; for "v3" ``pre``, ``avg``
            and ``normal``.
        checks: of this checkpoint before this one.
    """

    rank: int
    checkpoint: str
    step: int
    micro_batch: int
    level: int
    value: float
    state: Mapping[str, float]
    checks: int


def error_line(check: Check, settings: SentinelSettings) -> str:
    """Of a value of level 1."""
    if settings.detector == "v3":
        return f"{_prefix(check)}A grad-norm spike may happen: {_v3_fields(check, 'abnormal value')}."
    return _prefix(check) + _v2_alarm("L1 Error", check, settings)


def warning_line(check: Check, settings: SentinelSettings) -> str:
    """Of a value of level 2."""
    if settings.detector == "v3":
        return f"{_prefix(check)}A value is suspect, and not learnt from: {_v3_fields(check)}."
    return _prefix(check) + _v2_alarm("L2 Warning", check, settings)


def info_lines(check: Check, settings: SentinelSettings) -> tuple[str, str]:
    """Of a normal value: what was compared, and the constants."""
    if settings.detector == "v3":
        values, constants = f"A value is normal: {_v3_fields(check)}.", _v3_constants(settings)
    else:
        values, constants = f"{_v2_values(check)}.", f"{_v2_constants(settings)}, {_v2_mode(settings)}"
    return _prefix(check) + values, _prefix(check) + constants


def _prefix(check: Check) -> str:
    return f"[rank {check.rank}] [{check.checkpoint}] "


def _v2_alarm(what: str, check: Check, settings: SentinelSettings) -> str:
    # The nine blanks, and no comma before the mode, are the operator's own.
    return (
        f"SilentCheck get {what}, input message: {_v2_values(check)},         "
        f"{_v2_constants(settings)} {_v2_mode(settings)}."
    )


def _v2_values(check: Check) -> str:
    state = check.state
    return (
        f"val = [{check.value:f}], pre_val = [{state['pre']:f}], min_val = [{state['min']:f}], "
        f"max_val = [{state['max']:f}], step = [{check.checks}]"
    )


def _v2_constants(settings: SentinelSettings) -> str:
    return (
        f"c_min_steps = [{settings.min_steps}], "
        f"c_thresh_l1 = [{settings.upper[0]:f}], c_coeff_l1 = [{settings.sigma[0]:f}], "
        f"c_thresh_l2 = [{settings.upper[1]:f}], c_coeff_l2 = [{settings.sigma[1]:f}]"
    )


def _v2_mode(settings: SentinelSettings) -> str:
    return f"npu_asd_detect = [{settings.mode}]"


def _v3_fields(check: Check, value: str = "value") -> str:
    """Six significant digits: squares of gradients are far from 1."""
    state = check.state
    return (
        f"param name [{check.checkpoint}], {value} [{check.value:g}], previous value [{state['pre']:g}], "
        f"history avg [{state['avg']:g}], bp time [step {check.step}, micro-batch {check.micro_batch}], "
        f"normal count [{state['normal']:.0f}]"
    )


def _v3_constants(settings: SentinelSettings) -> str:
    return (
        f"upper_thresh1 = [{settings.upper[0]:g}], upper_thresh2 = [{settings.upper[1]:g}], "
        f"min_steps = [{settings.min_steps}], mode = [{settings.mode}]"
    )


def alarm_tree(errors: Sequence[Check]) -> dict[str, Any] | None:
    """The first value of level 1 on this rank, and how many followed it; None without any. For `gather_trees`."""
    if not errors:
        return None
    return {**asdict(errors[0]), "more": len({check.checkpoint for check in errors}) - 1}


def threshold_finding(trees: Mapping[int, dict[str, Any] | None]) -> SentinelFinding | None:
    """``trees``: of `alarm_tree`, by rank."""
    found = {rank: tree for rank, tree in trees.items() if tree is not None}
    more = []
    if len(found) == len(trees) > 1:
        more = ["All ranks see it: parameters, data or software first; one faulty device does not reach all at once."]
    what = "a gradient of an activation is far from normal, before any reduction of gradients"
    told = {rank: {"name": tree["checkpoint"], "text": _words(tree), **tree} for rank, tree in found.items()}
    return finding_of("thresholds", what, told, more)


def _words(tree: Mapping[str, Any]) -> str:
    state = ", ".join(f"{name} {value:g}" for name, value in tree["state"].items())
    more = f"; {tree['more']} more checkpoints after it" if tree["more"] else ""
    return (
        f"{tree['checkpoint']}, micro-batch {tree['micro_batch']}: value {tree['value']:g} after "
        f"{tree['checks']} checks ({state}){more}"
    )


_logger = logging.getLogger("ddpstats")

_KEPT_ORDERS = 64
_MOST_SKIPS = 16  # from the scale that a GradScaler begins with down to 1
_SILENT_STEPS = 3


class Thresholds(Detector):
    """Layer 1: judges this rank's values.

    Args:
        checkpoints: where values come from.
        rank: this one, global.
        ranks: of the group.
        scale: of the GradScaler, now; None where there is none, or it is off.
        reruns: to find out why a value is not normal; None without.
        before_rerun: called before that.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: SentinelSettings,
        rank: int,
        ranks: Sequence[int],
        scale: Callable[[], float | None],
        reruns: Reruns | None,
        before_rerun: Callable[[], None],
    ) -> None:
        self.checkpoints, self.warnings = checkpoints, checkpoints.warnings
        self._settings, self._rank, self._ranks, self._scale = settings, rank, ranks, scale
        self._reruns, self._before_rerun = reruns, before_rerun
        self._rule = RULES[settings.detector]
        self._alarmed: frozenset[int] = frozenset()  # the ranks with an alarm in the step before
        self._state: State | None = None
        self._next: State | None = None
        self._places: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._is_off = False
        self._skips = 0  # steps in a row that the GradScaler left out
        self._silent = 0  # steps without any value, from the first one on

    def begin(self) -> None:
        self.checkpoints.begin()

    def end(self, failed: bool) -> None:
        if failed:
            self.checkpoints.discard()
        else:
            self.checkpoints.end()

    def suspicious(self, step: int) -> Any:
        checks = self.look(step)
        self.log(checks)
        return alarm_tree([check for check in checks if check.level == ERROR])

    def findings(self, exam: Exam) -> list[SentinelFinding]:
        finding = threshold_finding(exam.evidence)
        before, self._alarmed = self._alarmed, frozenset(finding.culprit_ranks if finding else ())
        if finding is None:
            return []
        fresh = sorted(self._alarmed - before)
        if fresh and self._reruns is not None:
            self._before_rerun()
            exam.notes.append(
                explain_alarm(
                    exam.gathered,
                    self._reruns,
                    self._ranks,
                    self._rank,
                    fresh[0],
                    exam.evidence[fresh[0]]["micro_batch"],
                    self.is_abnormal,
                    self.checkpoints,
                )
            )
        return [finding]

    def conclude(self, verdict: SentinelVerdict | None) -> None:
        """A step that is not applied is not part of the past."""
        if verdict is not None and self._next is not None and (verdict.ok or self._settings.mode == 1):
            self._state = self._next
        self._next = None

    def close(self) -> None:
        self.checkpoints.close()

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
        if self.checkpoints.in_float16 and scale is None and not self._is_off:
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
