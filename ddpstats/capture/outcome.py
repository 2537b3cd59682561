"""What a replay came to, against what was captured: bit for bit, where that can be had. For people, and as JSON.

A NaN equals a NaN here, whatever its sign and payload are: torch promises nothing about those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpstats._base.text import count_of, shorten
from ddpstats._observe.gradient_norms import norm_kind
from ddpstats._rerun.run import RunSettings
from ddpstats.capture.manifest import Manifest
from ddpstats.capture.parts import RankPart
from ddpstats.capture.rerun import Outcome

_SHOWN = 5
_EQUAL = "equal"


@dataclass(frozen=True)
class ReplayComparison:
    """``equal``, or ``differ: ...``, or ``not compared: ...``."""

    losses: str
    norms: str
    gradients: str


def compare(part: RankPart, outcome: Outcome, settings: RunSettings, names: Sequence[str]) -> ReplayComparison:
    """Against the capture. ``names``: of the module's parameters, in its order."""
    if settings.precision != "captured":
        why = f"not compared: --precision {settings.precision}"
        return ReplayComparison(why, why, why)
    return ReplayComparison(
        _compare_losses(part, outcome),
        _compare_norms(part, outcome, settings, names),
        _compare_gradients(part, outcome),
    )


def _compare_losses(part: RankPart, outcome: Outcome) -> str:
    captured = [micro.loss for micro in part.micro_batches]
    pairs = [(then, now) for then, now in zip(captured, outcome.losses, strict=False) if then is not None]
    if not pairs:
        return "not compared: the capture has none"
    for place, (then, now) in enumerate(pairs):
        if not same(_without_shape(then), _without_shape(now)):
            return f"differ: micro-batch {place}: {_value(then)} then, {_value(now)} now"
    return _EQUAL


def _without_shape(loss: Tensor) -> Tensor:
    return loss.reshape(()) if loss.numel() == 1 else loss


def _value(loss: Tensor) -> str:
    return repr(loss.item()) if loss.numel() == 1 else f"a tensor of shape {tuple(loss.shape)}"


def _compare_norms(part: RankPart, outcome: Outcome, settings: RunSettings, names: Sequence[str]) -> str:
    pairs = [
        (micro.norms, now)
        for micro, now in zip(part.micro_batches, outcome.norms, strict=False)
        if micro.norms is not None and now is not None
    ]
    if not pairs:
        return "not compared: the capture has none"
    if norm_kind(settings.device) != part.norm:
        return f"not compared: {part.norm}-norms were captured, {settings.device} measures others"
    if list(names) != part.parameter_names:
        return "not compared: the module's parameters come in another order"
    for place, (then, now) in enumerate(pairs):
        other = [i for i in range(len(names)) if not same(then[i], now[i])]
        if other:
            first = other[0]
            what = f"{names[first]}: {then[first].item()!r} then, {now[first].item()!r} now"
            return f"differ: micro-batch {place}, {len(other)} of {len(names)} parameters, first {what}"
    return _EQUAL


def _compare_gradients(part: RankPart, outcome: Outcome) -> str:
    if part.gradients is None:
        return "not compared: the capture has none"
    lacking = [name for name in part.gradients if name not in outcome.gradients]
    if lacking:
        return f"differ: {lacking[0]} has no gradient now"
    other = [name for name, then in part.gradients.items() if not same(then, outcome.gradients[name])]
    return f"differ: {other[0]}" if other else _EQUAL


def same(one: Tensor, other: Tensor) -> bool:
    """Shape, dtype and every bit; NaN is NaN."""
    one, other = one.detach().cpu(), other.detach().cpu()
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if not one.is_floating_point():
        return torch.equal(one, other)
    nan = one.isnan()
    if not torch.equal(nan, other.isnan()):
        return False
    one, other = one.masked_fill(nan, 0), other.masked_fill(nan, 0)
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


def same_outcome(one: Outcome, other: Outcome) -> bool:
    """Whether two runs came to the same, in every bit."""
    if (type(one.error), one.raised_in, one.nonfinite) != (type(other.error), other.raised_in, other.nonfinite):
        return False
    if len(one.losses) != len(other.losses) or one.gradients.keys() != other.gradients.keys():
        return False
    losses = all(same(a, b) for a, b in zip(one.losses, other.losses, strict=True))
    return losses and all(same(one.gradients[name], other.gradients[name]) for name in one.gradients)


@dataclass(frozen=True)
class Replayed:
    """Everything that the report says."""

    bundle: str
    manifest: Manifest
    part: RankPart
    settings: RunSettings
    notes: list[str]
    outcomes: list[Outcome]
    reproduced: list[bool]
    comparison: ReplayComparison
    collectives: Mapping[str, int]
    bisected: Any = None

    @property
    def identical(self) -> bool:
        """Whether all runs came to the same."""
        return all(same_outcome(self.outcomes[0], other) for other in self.outcomes[1:])

    @property
    def then(self) -> list[str]:
        """Parameters that were not finite in the capture, in the module's order."""
        order = {name: place for place, name in enumerate(self.part.parameter_names)}
        names = self.manifest.parameters.get(self.part.rank, [])
        return sorted(names, key=lambda name: order.get(name, len(order)))

    @property
    def now(self) -> list[str]:
        return list(dict.fromkeys(name for outcome in self.outcomes for name in outcome.nonfinite))


def as_text(replayed: Replayed) -> str:
    part, manifest = replayed.part, replayed.manifest
    lines = [
        f"{replayed.bundle}: {manifest.reason} in step {manifest.step}",
        f"rank {part.rank} of {part.world_size}, {count_of(len(part.micro_batches), 'micro-batches')}, "
        f"captured on {part.device}, replayed on {replayed.settings.device}, "
        f"precision {_precision_words(replayed.settings)}",
        *(f"note: {note}" for note in replayed.notes),
        "",
        _headline(replayed),
        f"  not finite then: {_names(replayed.then)}",
        f"  not finite now:  {_names(replayed.now)}",
        *_error_lines(replayed),
        "bit for bit, against the capture:",
        f"  losses    {replayed.comparison.losses}",
        f"  norms     {replayed.comparison.norms}",
        f"  gradients {replayed.comparison.gradients}",
    ]
    if len(replayed.outcomes) > 1:
        lines.append(_repeat_words(replayed))
    if replayed.collectives:
        lines.append(_collective_words(replayed.collectives))
    if replayed.bisected is not None:
        lines += ["", replayed.bisected.as_text()]
    return "\n".join(lines)


def _precision_words(settings: RunSettings) -> str:
    if settings.precision != "amp" or settings.amp_dtype is None:
        return settings.precision
    return f"amp ({settings.amp_dtype})"


def _headline(replayed: Replayed) -> str:
    word = "reproduced" if any(replayed.reproduced) else "not reproduced"
    reason = replayed.manifest.reason
    if reason == "overflow":
        what = "every rank's own gradients were finite, and their sum was not: no rank alone shows it"
        return f"{word}: {what}; this rank's norms {'are as captured' if any(replayed.reproduced) else 'are not equal'}"
    if reason == "exception" and replayed.part.error is not None:
        return f"{word}: the capture raised {replayed.part.error}"
    count, total = len(replayed.now), len(replayed.part.parameter_names)
    loss = ", but a loss is" if not count and _has_bad_loss(replayed) else ""
    return f"{word}: {f'gradients of {count} of {total} parameters' if count else 'no gradient'} not finite{loss}"


def _has_bad_loss(replayed: Replayed) -> bool:
    return any(not bool(loss.isfinite().all()) for outcome in replayed.outcomes for loss in outcome.losses)


def _names(names: Sequence[str]) -> str:
    return shorten(names, _SHOWN) if names else "none"


def _error_lines(replayed: Replayed) -> list[str]:
    error = replayed.outcomes[0].error
    return [] if error is None else [f"  raised now: {type(error).__name__}: {error}"]


def _repeat_words(replayed: Replayed) -> str:
    count = f"reproduced in {sum(replayed.reproduced)} of {len(replayed.outcomes)} runs"
    if replayed.identical:
        return f"{count}; the runs are equal in every bit"
    return f"{count}; the result differs between runs: a race or transient fault, or a nondeterministic operation"


def _collective_words(collectives: Mapping[str, int]) -> str:
    names = ", ".join(f"{name} {count}" for name, count in sorted(collectives.items()))
    count = sum(collectives.values())
    were = "was" if count == 1 else "were"
    return f"{count_of(count, 'collectives')} {were} replaced by this rank's own values ({names})"


def as_json(replayed: Replayed) -> dict[str, Any]:
    manifest, part, settings = replayed.manifest, replayed.part, replayed.settings
    error = replayed.outcomes[0].error
    return {
        "bundle": replayed.bundle,
        "reason": manifest.reason,
        "step": manifest.step,
        "rank": part.rank,
        "world_size": part.world_size,
        "device": str(settings.device),
        "precision": settings.precision,
        "reproduced": any(replayed.reproduced),
        "runs": len(replayed.outcomes),
        "reproduced_runs": sum(replayed.reproduced),
        "runs_identical": replayed.identical,
        "nonfinite_then": list(replayed.then),
        "nonfinite_now": replayed.now,
        "error_then": part.error,
        "error_now": None if error is None else f"{type(error).__name__}: {error}",
        "losses": [_value(loss) for loss in replayed.outcomes[0].losses],  # as text: JSON has no NaN
        "bit_for_bit": vars(replayed.comparison),
        "collectives": dict(replayed.collectives),
        "notes": replayed.notes,
        "bisect": None if replayed.bisected is None else replayed.bisected.as_json(),
    }
