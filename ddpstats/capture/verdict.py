"""From what every rank saw in one step to the verdict that all of them return. Pure, but for `report_of`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ddpstats._base.text import ranks_text, shorten
from ddpstats._observe.gradient_norms import BackwardNorms, measure
from ddpstats._observe.gradients import GradientWatch
from ddpstats._rerun.record import scale_of

Policy = Literal["stop", "skip", "continue"]
Kind = Literal["ok", "nonfinite", "overflow", "scaler_skip", "scaler_skips"]

_SHOWN_NAMES = 4


@dataclass(frozen=True)
class CaptureVerdict:
    """What `NaNCapture.check` says of one optimizer step: equal on every rank.

    Attributes:
        step: the number of the step.
        kind: "ok"; "nonfinite": some rank's own gradients were not finite; "overflow": every rank's were, but what came
            out of the reduction is not; "scaler_skip": the GradScaler will skip this step, as it does now and then;
            "scaler_skips": it does so again and again.
        culprit_ranks: global ranks whose own gradients were not finite; empty where that is not known.
        parameters: names of the gradients that are not finite, in the order in which they came: the loss's end first.
        by_rank: culprit rank -> its part of ``parameters``.
        bundle: the directory that holds the capture; None if none was written.
        should_stop, should_skip: what the policy says that the caller should do; ``should_skip`` is set for both.
        message: all of that for people; empty for "ok".
        attribution: what reruns said of the cause; None where nothing was rerun.
    """

    step: int
    kind: Kind = "ok"
    culprit_ranks: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    by_rank: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    bundle: Path | None = None
    should_stop: bool = False
    should_skip: bool = False
    message: str = ""
    attribution: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the step may be taken. A step that the GradScaler skips by itself may."""
        return self.kind in ("ok", "scaler_skip")

    def __str__(self) -> str:
        return self.message or f"step {self.step}: all gradients are finite"


@dataclass(frozen=True)
class NonFiniteGradients:
    """Gradients of one backward pass that were not finite before the reduce: (name, "NaN" or "Inf").

    Attributes:
        backward_pass: counts those of the step.
        shared_with: the ranks with which the program itself had communicated by then, in this forward and backward
            pass: what one of them had, the others may have got. Empty where the gradients were this rank's own.
    """

    micro_batch: int
    backward_pass: int
    gradients: tuple[tuple[str, str], ...]
    shared_with: tuple[int, ...] = ()


@dataclass(frozen=True)
class Report:
    """What one rank saw in the step.

    Attributes:
        micro_batches: how many it had.
        bad: before the reduce, by backward pass.
        reduced: names of gradients that are not finite now.
        sees_local: False where gradients are sharded, and reduced before anybody can look.
        scale: of a GradScaler that is in use; None without.
        step: by its own count.
        exchanged: the backward passes after which gradients were reduced.
        unseen: those of ``reduced`` that did not arrive in a micro-batch.
    """

    micro_batches: int
    bad: tuple[NonFiniteGradients, ...]
    reduced: tuple[str, ...]
    sees_local: bool
    scale: float | None
    step: int
    exchanged: tuple[int, ...] = ()
    unseen: tuple[str, ...] = ()

    def to_tree(self) -> dict[str, Any]:
        """As `gather_trees` carries it."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Report:
        return cls(**{**tree, "bad": tuple(NonFiniteGradients(**one) for one in tree["bad"])})


def report_of(watch: GradientWatch, scaler: Any, step: int) -> Report:
    """What ``watch`` saw since the step began. Local; waits for the device."""
    bad, exchanged, arrived = [], [], set[int]()
    number = 0
    finite = measure([parameter.grad for parameter in watch.parameters]).isfinite().tolist()
    reduced = [place for place, fine in enumerate(finite) if not fine]
    for micro_batch, arrivals in enumerate(watch.arrivals):
        arrived |= arrivals.indices()
        seen = zip(arrivals.bad_indices(), arrivals.exchanged, arrivals.shared_with(), strict=True)
        for places, reduces, shared_with in seen:
            if places:
                bad.append(NonFiniteGradients(micro_batch, number, _named(watch, arrivals, places), shared_with))
            if reduces:
                exchanged.append(number)
            number += 1
    return Report(
        micro_batches=len(watch.arrivals),
        bad=tuple(bad),
        reduced=tuple(watch.names[place] for place in reduced),
        sees_local=watch.sees_local,
        scale=scale_of(scaler),
        step=step,
        exchanged=tuple(exchanged),
        unseen=tuple(watch.names[place] for place in reduced if place not in arrived),
    )


def _named(watch: GradientWatch, arrivals: BackwardNorms, places: list[int]) -> tuple[tuple[str, str], ...]:
    norms = arrivals.norms()
    assert norms is not None
    return tuple((watch.names[place], "NaN" if norms[place].isnan() else "Inf") for place in places)


@dataclass(frozen=True)
class CaptureFinding:
    """What the ranks' reports say together, before anything is written or decided."""

    step: int
    kind: Kind
    culprit_ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    by_rank: Mapping[int, tuple[str, ...]]
    lines: tuple[str, ...]

    def verdict(self, policy: Policy, bundle: Path | None, notes: Sequence[str] = ()) -> CaptureVerdict:
        """``notes``: lines about the bundle."""
        if self.kind in ("ok", "scaler_skip"):
            return CaptureVerdict(self.step, self.kind, message="\n".join(self.lines))
        stop, skip = policy == "stop", policy in ("stop", "skip")
        message = "\n".join([*self.lines, *notes, _POLICY_TEXT[policy]])
        return CaptureVerdict(
            self.step, self.kind, self.culprit_ranks, self.parameters, self.by_rank, bundle, stop, skip, message
        )


_POLICY_TEXT = {
    "stop": "on_nonfinite='stop': every rank should stop before its optimizer takes this step.",
    "skip": "on_nonfinite='skip': every rank should leave this step out and go on.",
    "continue": "on_nonfinite='continue': every rank takes the step as it is.",
}


def find(reports: Mapping[int, Report], scaler_skips: int, max_scaler_skips: int) -> CaptureFinding:
    """What happened in this step.

    Args:
        reports: of all ranks, by global rank.
        scaler_skips: how many steps in a row, with this one, a GradScaler had to skip.
        max_scaler_skips: from how many on that is a capture.
    """
    step = next(iter(reports.values())).step
    seen = {rank: _names(report) for rank, report in reports.items() if report.bad}
    parameters = _union([*seen.values(), *(report.reduced for report in reports.values())])
    if not parameters:
        return CaptureFinding(step, "ok", (), (), {}, ())
    own = _without_spread(_without_inherited(reports))
    by_rank = {rank: _names(report) for rank, report in own.items() if report.bad}
    if any(report.scale is not None for report in reports.values()):
        return _scaled(step, own, by_rank, parameters, scaler_skips, max_scaler_skips)
    if by_rank:
        culprits = tuple(by_rank)
        lines = [f"step {step}: the gradients of {ranks_text(culprits)} are not finite, before any reduction:"]
        lines += [*_culprit_lines(own), *_other_lines([rank for rank in reports if rank not in by_rank], seen)]
        return CaptureFinding(step, "nonfinite", culprits, _union(by_rank.values()), by_rank, tuple(lines))
    if seen:
        names = shorten(parameters, _SHOWN_NAMES)
        lines = [f"step {step}: gradients are not finite on {ranks_text(seen)}: {names}.", _SPREAD]
        return CaptureFinding(step, "nonfinite", (), parameters, {}, tuple(lines))
    return _without_culprit(step, reports, parameters)


_SPREAD = (
    "When they could be seen, the program may have reduced them, or what they are made from: a collective of its "
    "own ran before them (in a hook, a backward() or a forward pass). Which rank they come from is not known."
)


def _other_lines(others: Sequence[int], seen: Mapping[int, Any]) -> list[str]:
    fine, reached = [rank for rank in others if rank not in seen], [rank for rank in others if rank in seen]
    lines = [f"The gradients of {ranks_text(fine)} were finite."] if fine else []
    if reached:
        lines.append(f"Those of {ranks_text(reached)} had been reduced with others' before they could be seen.")
    return lines


def _without_spread(reports: Mapping[int, Report]) -> Mapping[int, Report]:
    """What a rank may have got from another one is not its own; it is, if one that communicated as well was fine."""
    bad = {rank for rank, report in reports.items() if report.bad}
    spread = {rank for rank in bad if _may_have_spread(reports[rank].bad[0].shared_with, bad, reports)}
    return {rank: replace(report, bad=()) if rank in spread else report for rank, report in reports.items()}


def _may_have_spread(shared_with: Sequence[int], bad: Collection[int], reports: Mapping[int, Report]) -> bool:
    others = [rank for rank in shared_with if rank in reports]
    return len(others) > 1 and all(rank in bad for rank in others)


def _without_inherited(reports: Mapping[int, Report]) -> Mapping[int, Report]:
    """Where gradients are reduced after each backward pass, one rank's NaN is in those of all from then on."""
    spread = [
        number
        for report in reports.values()
        for bad in report.bad
        for number in report.exchanged
        if number >= bad.backward_pass
    ]
    if not spread:
        return reports
    return {
        rank: replace(report, bad=tuple(bad for bad in report.bad if bad.backward_pass <= min(spread)))
        for rank, report in reports.items()
    }


def _without_culprit(step: int, reports: Mapping[int, Report], parameters: tuple[str, ...]) -> CaptureFinding:
    shown = shorten(parameters, _SHOWN_NAMES)
    holders = [rank for rank, report in reports.items() if report.reduced]
    if not all(report.sees_local for report in reports.values()):
        lines = [
            f"step {step}: gradients are not finite: {shown} (in the shards of {ranks_text(holders)}).",
            "They are sharded, and reduced before anybody can look: which rank they come from is not known.",
        ]
        return CaptureFinding(step, "nonfinite", (), parameters, {}, tuple(lines))
    if all(set(report.reduced) <= set(report.unseen) for report in reports.values()):
        lines = [
            f"step {step}: gradients are not finite on {ranks_text(holders)}: {shown}.",
            "No rank saw them arrive, so nobody knows whose they were: backward() belongs inside of micro_batch().",
        ]
        return CaptureFinding(step, "nonfinite", (), parameters, {}, tuple(lines))
    lines = [
        f"step {step}: every rank's own gradients were finite, but what came out of the reduction is not, on "
        f"{ranks_text(holders)}: {shown}.",
        "No rank is the culprit: a sum or a compressing communication hook overflowed"
        + (", or memory of these ranks was damaged." if len(holders) < len(reports) else "."),
    ]
    return CaptureFinding(step, "overflow", (), parameters, {}, tuple(lines))


def _scaled(
    step: int,
    reports: Mapping[int, Report],
    by_rank: Mapping[int, tuple[str, ...]],
    parameters: tuple[str, ...],
    scaler_skips: int,
    max_scaler_skips: int,
) -> CaptureFinding:
    """Under a GradScaler gradients overflow now and then by design; again and again they do not."""
    scales = {rank: report.scale for rank, report in reports.items()}
    differ = len(set(scales.values())) > 1
    lines = [f"step {step}: gradients are not finite at scale {_one_or_all(scales)}, and GradScaler skips the step"]
    if differ:
        lines.append("The ranks' scales differ: their parameters will, too. Every rank must unscale and update alike.")
    if scaler_skips < max_scaler_skips:
        return CaptureFinding(step, "scaler_skip", (), (), {}, tuple(lines))
    lines[0] += f", for the {scaler_skips}th time in a row: this is not about the scale."
    lines += _culprit_lines(reports)
    return CaptureFinding(step, "scaler_skips", tuple(by_rank), parameters, by_rank, tuple(lines))


def _culprit_lines(reports: Mapping[int, Report]) -> list[str]:
    lines = []
    for rank, report in reports.items():
        if report.bad:
            first = report.bad[0]
            where = f", first in micro-batch {first.micro_batch} of {report.micro_batches}"
            kinds = sorted({what for _, what in first.gradients})
            names = tuple(name for name, _ in first.gradients)
            lines.append(f"  rank {rank}: {' and '.join(kinds)} in {shorten(names, _SHOWN_NAMES)}{where}")
    return lines


def _names(report: Report) -> tuple[str, ...]:
    return _union([tuple(name for name, _ in one.gradients) for one in report.bad])


def _union(parts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part))


def _one_or_all(scales: Mapping[int, float | None]) -> str:
    values = list(dict.fromkeys(scales.values()))
    if len(values) == 1:
        return f"{values[0]:g}"
    return ", ".join(f"{scale} (rank {rank})" for rank, scale in scales.items())
