"""Where a non-finite gradient comes from, found out without a restart: the same step once more, here and on a peer.

1. The culprit runs its micro-batches again, twice, on the module in use (`ddpstats._rerun.blame`). Where losses and
   norms that were finite then are others now, ``step_fn`` is not the step that was trained, and nothing can be said.
2. Finite now: something that does not depend on the inputs made it, a race or a transient fault.
3. Otherwise the next replica with the same parameters has run them, too. Finite there: the culprit's device, or what
   its process holds beside the state that was handed out. Not finite there either: software or data.

Whether another precision would have been enough is for a replay to say: the text has the command.

Parameters, buffers, gradients and random state of the training stay as they are. A step that communicates cannot be run
by one rank: it is stopped before its first collective, and the text says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpstats._base.text import shorten
from ddpstats._observe.gradient_norms import NO_GRADIENT, measure
from ddpstats._rerun.blame import Cause, Gathered, blame, cause_of, from_rank_on, hand_out
from ddpstats._rerun.record import walk
from ddpstats._rerun.run import Rerun, Reruns
from ddpstats.capture.verdict import CaptureFinding

_SHOWN = 3
_RTOL = 1e-3  # atomic additions on a GPU come in another order each time
_ATOL = 1e-5  # of the largest norm: what should cancel to nothing does so up to noise


def attribute_cause(
    reruns: Reruns,
    norms: Mapping[str, Tensor],
    gathered: Gathered,
    rank: int,
    finding: CaptureFinding,
    model_writers: Mapping[int, int],
    directory: Path | None,
) -> str | None:
    """Return the cause in words; None where no rank is the culprit. Collective: two gathers.

    Args:
        norms: of this rank's gradients, by name, where they are of one micro-batch alone; empty otherwise.
        gathered: every rank's tree by global rank; collective.
        model_writers: ranks that have the same one have the same parameters.
        directory: the bundle, if one was written.
    """
    if not finding.culprit_ranks:
        return None
    culprit = finding.culprit_ranks[0]
    peer = _peer_of(culprit, finding.culprit_ranks, model_writers)

    def packed() -> dict[str, Any]:
        micro_batches = reruns.micro_batches
        losses = [None if micro.loss is None else torch.as_tensor(micro.loss).sum().item() for micro in micro_batches]
        bad = [
            f"{path} of micro-batch {index}"
            for index, micro in enumerate(micro_batches)
            for path, leaf in walk(micro.batch)
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all())
        ]
        return {**reruns.pack(micro_batches), "losses": losses, "norms": dict(norms), "bad": bad, "place": reruns.place}

    packet = hand_out(gathered, rank == culprit, culprit, packed)
    if "error" in packet:
        return f"Cause not found: rank {culprit} could not hand out the step: {packet['error']}"

    def run() -> dict[str, Any]:
        rerun = reruns.run(packet)
        finite = measure(rerun.gradients).isfinite().tolist()
        nonfinite = [name for name, fine in zip(reruns.names, finite, strict=True) if not fine]
        return {"nonfinite": nonfinite, "difference": _difference(packet, rerun, reruns.names)}

    answers = blame(gathered, rank, culprit, () if peer is None else (peer,), run)
    if "error" in answers[culprit]:
        return f"Cause not found: rank {culprit} could not run the step again: {answers[culprit]['error']}"
    runs = answers[culprit]["runs"]
    if all(run["difference"] for run in runs):
        return _another_step(culprit, runs)
    there = None if peer is None else answers[peer]
    wrong_there = None if there is None or "error" in there else there["runs"][0]["nonfinite"]
    cause = cause_of([run["nonfinite"] for run in runs], wrong_there)
    if cause is Cause.TRANSIENT:
        return _transient(culprit, runs, all(map(_is_finite, packet["losses"])))
    again = f"run again from the same state, rank {culprit} gets non-finite gradients again"
    if cause is Cause.HARDWARE:
        return (
            f"Cause: hardware of rank {culprit} ({packet['place']}), or something that only rank {culprit} holds "
            f"outside of parameters, buffers, batch and random state: {again}, and rank {peer} gets finite ones from "
            "these."
        )
    if there is None:
        lines = [f"Cause: {again}; no other rank has the same parameters, to tell its device from its software."]
    elif cause is Cause.UNDECIDED:
        lines = [f"Cause: {again}; rank {peer} could not run it: {there['error']}"]
    else:
        lines = [f"Cause: software or data: {again}, and so does rank {peer}."]
    if packet["bad"]:
        lines.append(f"The batch itself is not finite: {shorten(packet['bad'], _SHOWN)}.")
    if directory is not None:
        lines.append(
            f"Whether more digits would have been enough, for --precision fp32 or fp64: ddpstats replay {directory} "
            f"--model MODULE:FUNCTION --step MODULE:FUNCTION --rank {culprit} --precision fp32"
        )
    return "\n".join(lines)


def _peer_of(culprit: int, culprits: Sequence[int], model_writers: Mapping[int, int]) -> int | None:
    """Return the next rank with the same parameters; one that saw no fault of its own, if there is one."""
    ranks = from_rank_on(list(model_writers), culprit)[1:]
    others = [rank for rank in ranks if model_writers[rank] == model_writers[culprit]]
    return next((rank for rank in others if rank not in culprits), others[0] if others else None)


def _difference(packet: Mapping[str, Any], rerun: Rerun, names: Sequence[str]) -> str | None:
    """Return in words what was finite in the step and is another number now."""
    for index, (before, loss) in enumerate(zip(packet["losses"], rerun.losses, strict=True)):
        after = loss.sum().item()
        if _is_finite(before) and not torch.isclose(torch.tensor(before), torch.tensor(after), rtol=_RTOL, atol=0.0):
            return f"micro-batch {index}: the loss was {before:g}, and is {after:g}"
    norms = dict(zip(names, measure(rerun.gradients).tolist(), strict=True))
    finite = {name: norm.item() for name, norm in packet["norms"].items() if norm.isfinite() and name in norms}
    atol = _ATOL * max(finite.values(), default=0.0)
    for name, before in finite.items():
        after = norms[name]
        has_moved = (before == NO_GRADIENT) != (after == NO_GRADIENT) or not abs(
            after - before
        ) <= atol + _RTOL * before
        if has_moved and before != after:
            return f"micro-batch 0: the gradient of {name} {_norm_text(before)}, and now {_norm_text(after)}"
    return None


def _is_finite(loss: float | None) -> bool:
    return loss is not None and abs(loss) < float("inf")


def _norm_text(norm: float) -> str:
    return "did not arrive" if norm == NO_GRADIENT else f"had norm {norm:g}"


def _another_step(culprit: int, runs: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"Cause not found: step_fn is not the step that was trained: run again on rank {culprit} from the same state, "
        f"{runs[0]['difference']}. Let it return what backward() was called on, before a GradScaler's scale."
    ]
    if not all(run["nonfinite"] for run in runs):
        lines.append("Or a fault changed finite numbers, too: run again, the gradients are finite.")
    return "\n".join(lines)


def _transient(culprit: int, runs: Sequence[Mapping[str, Any]], losses_known: bool) -> str:
    finite = sum(not run["nonfinite"] for run in runs)
    lines = [
        f"Cause: a race or a transient fault on rank {culprit}: run again from the same state, its gradients were "
        f"finite in {finite} of {len(runs)} runs."
    ]
    if finite == len(runs) and not losses_known:
        lines.append(
            "Or step_fn leaves out what made them: not every micro-batch has a finite loss to compare with the rerun's."
        )
    return "\n".join(lines)
