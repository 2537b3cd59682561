"""The lines that the sentinel logs: what a check compared with what. Pure.

For the detector "v2" they are those of CANN's SilentCheckV2 operator to the letter, after a prefix that says which rank
and which checkpoint: scripts that search device logs for them find these, too. For "v3" they have the fields of the
lines that torch_npu and MindSpore write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddpstats.sentinel._settings import SentinelSettings


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
    return _prefix(check) + (_v3_alarm(check) if settings.detector == "v3" else _v2_alarm("L1 Error", check, settings))


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


def _v3_alarm(check: Check) -> str:
    return f"A grad-norm spike may happen: {_v3_fields(check, 'abnormal value')}."


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
