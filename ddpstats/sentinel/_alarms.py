"""Values that are not normal: lines in the log, what ranks tell each other of them, and what that comes to. Pure.

For the detector "v2" the lines are those of CANN's SilentCheckV2 operator to the letter, after a prefix that says which
rank and which checkpoint: scripts that search device logs for them find these, too. For "v3" they have the fields of
the lines that torch_npu and MindSpore write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ddpstats._base.text import ranks_text
from ddpstats.sentinel._settings import SentinelSettings
from ddpstats.sentinel._verdict import Layer, SentinelFinding

if TYPE_CHECKING:
    from ddpstats.sentinel._matmul_checksum import MatmulFault


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


_SHOWN_RANKS = 8


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
    return _finding("thresholds", what, told, more)


def _finding(
    layer: Layer, what: str, told: Mapping[int, Mapping[str, Any]], more: Sequence[str] = ()
) -> SentinelFinding | None:
    """``told``: name, text and value, by rank; None without any. ``more``: lines at the end."""
    if not told:
        return None
    lines = [f"{ranks_text(told)}: {what}"]
    lines += [f"  rank {rank}: {tree['text']}" for rank, tree in list(told.items())[:_SHOWN_RANKS]]
    first = told[min(told)]
    return SentinelFinding(layer, tuple(sorted(told)), first["name"], "\n".join([*lines, *more]), first["value"])


def _words(tree: Mapping[str, Any]) -> str:
    state = ", ".join(f"{name} {value:g}" for name, value in tree["state"].items())
    more = f"; {tree['more']} more checkpoints after it" if tree["more"] else ""
    return (
        f"{tree['checkpoint']}, micro-batch {tree['micro_batch']}: value {tree['value']:g} after "
        f"{tree['checks']} checks ({state}){more}"
    )


def fault_tree(faults: Sequence[MatmulFault], count: int) -> dict[str, Any] | None:
    """The first wrong row on this rank, and how many there were; None without any. For `gather_trees`."""
    if not faults:
        return None
    first = faults[0]
    m, k, n = first.shape
    where = "backward" if first.backward else "forward"
    often = "it computes the same again: a sticky fault"
    if first.transient:
        often = "computed again, it is right: a transient fault"
    more = f"; {count - 1} more rows" if count > 1 else ""
    text = (
        f"{first.op} of ({m}, {k}) with ({k}, {n}) in {first.dtype}, {where}: "
        f"element {list(first.index)} is {first.got:g} instead of {first.expected:g}; {often}{more}"
    )
    return {"name": first.op, "text": text, "value": first.got}


def matmul_finding(trees: Mapping[int, dict[str, Any] | None]) -> SentinelFinding | None:
    """``trees``: of `fault_tree`, by rank."""
    found = {rank: tree for rank, tree in trees.items() if tree is not None}
    return _finding("matmul checksum", "a product of matrices is not what its operands say", found)
