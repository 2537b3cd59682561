"""The verdict of all ranks on one step, and the cause of a gradient that is not finite.

1. `report_of` says what one rank saw; `find` makes one verdict of all reports, and is pure.
2. `find_cause` runs the step again: on the culprit twice, on the module in use, then once on the next replica with the
   same parameters (`_rerun.blame`). Where losses and norms that were finite then are others now, ``step_fn`` is not the
   step that was trained, and the cause cannot be found. Finite now: a race or a transient fault. Finite on the replica:
   the culprit's device, or what its process holds beside the state that was sent. Otherwise software or data.

Parameters, buffers, gradients and random state of the training stay as they are. A step that communicates cannot be run
by one rank: it is stopped before its first collective, and the text says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ddpstats._base.text import ranks_text, shorten
from ddpstats._observe.gradient_norms import measure
from ddpstats._observe.gradients import GradientWatch
from ddpstats._rerun.blame import Cause, Gathered, blame, cause_of, from_rank_on, hand_out, unpack_step
from ddpstats._rerun.record import scale_of, walk, widen
from ddpstats._rerun.run import Rerun, Reruns
from ddpstats._rerun.state import place_text

Policy = Literal["stop", "skip", "continue"]
VerdictKind = Literal["ok", "nonfinite", "overflow", "scaler_skip", "scaler_skips"]

_SHOWN_NAMES = 4
_RTOL = 1e-3  # atomic additions on a GPU come in another order each time
_ATOL = 1e-5  # of the largest norm: what should cancel to nothing does so up to noise


@dataclass(frozen=True)
class CaptureVerdict:
    """The verdict of all ranks on one optimizer step, equal on every rank.

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
    kind: VerdictKind = "ok"
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
        """Return whether the step may be taken. A step that the GradScaler skips by itself may."""
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
    """One rank's gradients of the step, as it saw them.

    Attributes:
        micro_batches: how many it had.
        bad: before the reduce, by backward pass.
        reduced: names of gradients that are not finite now.
        sees_local: False where gradients are sharded, and reduced before they can be seen.
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

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the gradients that were not finite before the reduce."""
        return _union(tuple(name for name, _ in bad.gradients) for bad in self.bad)


def report_of(watch: GradientWatch, scaler: Any, step: int) -> Report:
    """Return what ``watch`` saw since the step began. Local; waits for the device."""
    bad, exchanged, arrived = [], [], set[int]()
    number = 0
    finite = measure([parameter.grad for parameter in watch.parameters]).isfinite().tolist()
    reduced = [index for index, is_finite in enumerate(finite) if not is_finite]
    for micro_batch, arrivals in enumerate(watch.arrivals):
        arrived |= arrivals.indices()
        norms = arrivals.norms()
        passes = zip(arrivals.bad_indices(), arrivals.exchanged, arrivals.find_communicating_ranks(), strict=True)
        for indices, is_reduced, shared_with in passes:
            if indices:
                assert norms is not None
                named = tuple((watch.names[index], "NaN" if norms[index].isnan() else "Inf") for index in indices)
                bad.append(NonFiniteGradients(micro_batch, number, named, shared_with))
            if is_reduced:
                exchanged.append(number)
            number += 1
    return Report(
        micro_batches=len(watch.arrivals),
        bad=tuple(bad),
        reduced=tuple(watch.names[index] for index in reduced),
        sees_local=watch.sees_local,
        scale=scale_of(scaler),
        step=step,
        exchanged=tuple(exchanged),
        unseen=tuple(watch.names[index] for index in reduced if index not in arrived),
    )


def find(reports: Mapping[int, Report], scaler_skips: int, max_scaler_skips: int) -> CaptureVerdict:
    """Return what happened in this step, before anything is written or decided.

    Args:
        reports: of all ranks, by global rank.
        scaler_skips: how many steps in a row, with this one, a GradScaler had to skip.
        max_scaler_skips: from how many on that is a capture.
    """
    first = next(iter(reports.values()))
    parameters = _union([*(report.names for report in reports.values()), *(r.reduced for r in reports.values())])
    if not parameters:
        return CaptureVerdict(first.step)
    own = _without_spread(_without_inherited(reports))
    by_rank = {rank: report.names for rank, report in own.items() if report.bad}
    scale = next((report.scale for report in reports.values() if report.scale is not None), None)
    if scale is None and not by_rank:
        return _without_culprit(first.step, reports, parameters)
    lines = [f"step {first.step}: the gradients of {ranks_text(by_rank)} are not finite, before any reduction:"]
    kind: VerdictKind = "nonfinite"
    if scale is not None:  # under a GradScaler gradients overflow now and then by design
        text = f"step {first.step}: gradients are not finite at scale {scale:g}, and GradScaler skips the step"
        if scaler_skips < max_scaler_skips:
            return CaptureVerdict(first.step, "scaler_skip", message=text)
        lines = [f"{text}, {scaler_skips} times in a row: this is not about the scale."]
        kind = "scaler_skips"
    lines += [_culprit_line(rank, report) for rank, report in own.items() if report.bad]
    finite = [rank for rank, report in reports.items() if not report.bad]
    if finite and by_rank and all(report.sees_local for report in reports.values()):
        lines.append(f"The gradients of {ranks_text(finite)} were finite.")
    names = _union(by_rank.values()) or parameters
    return CaptureVerdict(first.step, kind, tuple(by_rank), names, by_rank, message="\n".join(lines))


def _culprit_line(rank: int, report: Report) -> str:
    first = report.bad[0]
    kinds = " and ".join(sorted({kind for _, kind in first.gradients}))
    names = shorten([name for name, _ in first.gradients], _SHOWN_NAMES)
    return f"  rank {rank}: {kinds} in {names}, first in micro-batch {first.micro_batch} of {report.micro_batches}"


def _without_spread(reports: Mapping[int, Report]) -> Mapping[int, Report]:
    """Drop what a rank may have received from another; unless one that communicated as well was finite."""
    bad = {rank for rank, report in reports.items() if report.bad}
    spread = {rank for rank in bad if _may_have_spread(reports[rank].bad[0].shared_with, bad, reports)}
    return {rank: replace(report, bad=()) if rank in spread else report for rank, report in reports.items()}


def _may_have_spread(shared_with: Sequence[int], bad: Collection[int], reports: Mapping[int, Report]) -> bool:
    others = [rank for rank in shared_with if rank in reports]
    return len(others) > 1 and all(rank in bad for rank in others)


def _without_inherited(reports: Mapping[int, Report]) -> Mapping[int, Report]:
    """Drop what came of an earlier reduce: one rank's NaN is in the gradients of all ranks from then on."""
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


def _without_culprit(step: int, reports: Mapping[int, Report], parameters: tuple[str, ...]) -> CaptureVerdict:
    kind: VerdictKind = "nonfinite"
    holders = [rank for rank, report in reports.items() if report.bad or report.reduced]
    where = f"on {ranks_text(holders)}: {shorten(parameters, _SHOWN_NAMES)}."
    head = f"step {step}: gradients are not finite {where}"
    if any(report.bad for report in reports.values()):
        why = (
            "When they could be seen, the program may have reduced them, or what they are made from: a collective of "
            "its own ran before them (in a hook, a backward() or a forward pass). Which rank they come from is not "
            "known."
        )
    elif not all(report.sees_local for report in reports.values()):
        why = "They are sharded, and reduced before they can be seen: which rank they come from is not known."
    elif all(set(report.reduced) <= set(report.unseen) for report in reports.values()):
        why = "No rank saw them arrive: backward() belongs inside of micro_batch()."
    else:
        kind = "overflow"
        head = (
            f"step {step}: every rank's own gradients were finite, but what the reduction made of them is not, {where}"
        )
        why = "No rank is the culprit: a sum or a compressing communication hook overflowed"
        why += ", or memory of these ranks was damaged." if len(holders) < len(reports) else "."
    return CaptureVerdict(step, kind, (), parameters, message=f"{head}\n{why}")


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part))


# -- the cause --------------------------------------------------------------------------------------------------------


def find_cause(
    reruns: Reruns,
    norms: Mapping[str, Tensor],
    gathered: Gathered,
    rank: int,
    verdict: CaptureVerdict,
    model_writers: Mapping[int, int],
) -> str | None:
    """Return the cause in words; None where no rank is the culprit. Collective: two gathers.

    Args:
        norms: of this rank's gradients, by name, where they are of one micro-batch alone; empty otherwise.
        gathered: every rank's tree by global rank; collective.
        model_writers: ranks that have the same one have the same parameters.
    """
    if not verdict.culprit_ranks:
        return None
    culprit = verdict.culprit_ranks[0]
    replicas = [replica for replica in model_writers if model_writers[replica] == model_writers[culprit]]
    peers = from_rank_on(replicas, culprit)[1:]
    finite = [replica for replica in peers if replica not in verdict.culprit_ranks]
    peer = next(iter([*finite, *peers]), None)

    def pack_evidence() -> dict[str, Any]:
        micro_batches = reruns.record.micro_batches
        losses = [None if micro.loss is None else float(torch.as_tensor(micro.loss).sum()) for micro in micro_batches]
        bad = [
            f"{path} of micro-batch {index}"
            for index, micro in enumerate(micro_batches)
            for path, leaf in walk(micro.batch)
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(widen(leaf).isfinite().all())
        ]
        return {
            "step": reruns.pack(micro_batches),
            "losses": losses,
            "norms": dict(norms),
            "bad": bad,
            "host": place_text(reruns.record.module),
        }

    packet = hand_out(gathered, rank, [culprit], pack_evidence, f"the step of rank {culprit}")[culprit]
    if "error" in packet:
        return f"Cause not found: rank {culprit} could not send the step: {packet['error']}"

    def run() -> dict[str, Any]:
        rerun = reruns.run(unpack_step(packet, culprit))
        finite = measure(rerun.gradients).isfinite().tolist()
        nonfinite = [name for name, is_finite in zip(reruns.names, finite, strict=True) if not is_finite]
        return {"nonfinite": nonfinite, "difference": _difference(packet, rerun, reruns.names)}

    answers = blame(gathered, rank, culprit, () if peer is None else (peer,), run)
    return _cause_text(culprit, peer, packet, answers, verdict.bundle)


def _cause_text(
    culprit: int,
    peer: int | None,
    packet: Mapping[str, Any],
    answers: Mapping[int, Mapping[str, Any]],
    bundle: Path | None,
) -> str:
    """Return the cause in words. ``packet``: what ran; ``answers``: of the culprit, and of ``peer`` if there is one."""
    if "error" in answers[culprit]:
        return f"Cause not found: rank {culprit} could not run the step again: {answers[culprit]['error']}"
    runs = answers[culprit]["runs"]
    if all(run["difference"] for run in runs):
        return (
            f"Cause not found: step_fn is not the step that was trained: run again on rank {culprit} from the same "
            f"state, {runs[0]['difference']}. Let it return what backward() was called on, before a GradScaler's "
            "scale. Or a fault changed finite numbers, too."
        )
    answer: Mapping[str, Any] = (
        {"error": "no other rank is known to have the same parameters"} if peer is None else answers[peer]
    )
    nonfinite_there = None if "error" in answer else answer["runs"][0]["nonfinite"]
    cause = cause_of([run["nonfinite"] for run in runs], nonfinite_there)
    if cause is Cause.TRANSIENT:
        count = sum(not run["nonfinite"] for run in runs)
        return (
            f"Cause: a race or a transient fault on rank {culprit}, unless step_fn leaves out what made them: run "
            f"again from the same state, its gradients were finite in {count} of {len(runs)} runs."
        )
    again = f"run again from the same state, rank {culprit} gets non-finite gradients again"
    if cause is Cause.HARDWARE:
        return (
            f"Cause: hardware of rank {culprit} ({packet['host']}), or something that only rank {culprit} holds "
            f"outside of parameters, buffers, batch and random state: {again}, and rank {peer} gets finite ones from "
            "these."
        )
    lines = [f"Cause: software or data: {again}, and so does rank {peer}."]
    if cause is Cause.UNDECIDED:
        lines = [f"Cause: {again}; no peer could run it: {answer['error']}."]
    if packet["bad"]:
        lines.append(f"The batch itself is not finite: {shorten(packet['bad'], _SHOWN_NAMES)}.")
    if bundle is not None:
        lines.append(
            f"To see whether more digits would have been enough: ddpstats replay {bundle} "
            f"--model MODULE:FUNCTION --step MODULE:FUNCTION --rank {culprit} --precision fp32"
        )
    return "\n".join(lines)


def _difference(packet: Mapping[str, Any], rerun: Rerun, names: Sequence[str]) -> str | None:
    """Return in words what was finite in the step and is another number now."""
    for index, (before, loss) in enumerate(zip(packet["losses"], rerun.losses, strict=True)):
        after = loss.sum().item()
        if before is not None and math.isfinite(before) and not math.isclose(before, after, rel_tol=_RTOL):
            return f"micro-batch {index}: the loss was {before:g}, and is {after:g}"
    norms = dict(zip(names, measure(rerun.gradients).tolist(), strict=True))
    finite = {name: norm.item() for name, norm in packet["norms"].items() if norm.isfinite() and name in norms}
    atol = _ATOL * max(finite.values(), default=0.0)
    for name, before in finite.items():
        if not math.isclose(before, norms[name], rel_tol=_RTOL, abs_tol=max(atol, 0.0)):
            return f"micro-batch 0: the gradient of {name} had norm {before:g}, and has {norms[name]:g}"
    return None
