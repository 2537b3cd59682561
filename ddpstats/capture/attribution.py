"""Where a non-finite gradient comes from, found out without a restart: the same step once more, here and on a peer.

1. The culprit runs its part of the step again, twice, from the captured state. Where losses and norms that were finite
   then are others now, ``step_fn`` is not the step that was trained, and nothing can be said.
2. Finite now: something that does not depend on the inputs made it, a race or a transient fault.
3. Otherwise the next replica with the same parameters runs the culprit's part, read from the bundle. Finite there: the
   culprit's device, or what its process holds beside the captured state. Not finite there either: software or data.
4. Meanwhile the culprit runs it in float32 and, where it is not finite there either, in float64, without autocast.
   Finite in one of them: the numbers overflowed or ran out of digits. Not finite either: the mathematics, or the data.

The other ranks wait for no longer than DDPSTATS_TIMEOUT_SEC: runs that would take longer, by the time that the first
one took, are left out, and the text says so.

Each run has a copy of the module: parameters, buffers, gradients and random state of the training stay as they are.
A step that communicates cannot be run by one rank: it is stopped before its first collective, and the text says so.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._base import config
from ddpstats._base.text import shorten
from ddpstats._observe.gradient_norms import NO_GRADIENT
from ddpstats._ranks.comm import patience_sec
from ddpstats._ranks.gather import gather_trees
from ddpstats._rerun.codec import from_plain
from ddpstats._rerun.record import walk
from ddpstats._rerun.run import Cause, RunSettings, alone, attempt, cause_of, from_rank_on
from ddpstats._rerun.state import device_of, place_text
from ddpstats.capture._verdict import CaptureFinding
from ddpstats.capture.bundle import Bundle, BundleWriter
from ddpstats.capture.parts import PartSource, RankPart
from ddpstats.capture.rerun import Outcome, Rerun
from ddpstats.errors import ConfigError

_NAME = "NaNCapture.check: the step once more"
_RUNS = 2
_SHOWN = 3
_RTOL = 1e-3  # atomic additions on a GPU come in another order each time
_ATOL = 1e-5  # of the largest norm: what should cancel to nothing does so up to noise
_SPARE = 1.5  # no two runs take equally long
_SLOWER = {"fp32": 2.0, "fp64": 4.0}
_SLOWER_GPU_FP64 = 32.0  # few of them compute in float64 at more than a small part of their speed


def attribute_cause(
    module: nn.Module,
    step_fn: Callable[[nn.Module, Any], Tensor],
    source: PartSource,
    finding: CaptureFinding,
    bundling: BundleWriter,
) -> str | None:
    """The cause in words; None where no rank is the culprit. Collective: two gathers, one where the first one tells.

    ``bundling``: finished, so that a peer can read the culprit's part.
    """
    if not finding.culprit_ranks:
        return None
    culprit = finding.culprit_ranks[0]
    ranks, rank, group = bundling.peers.ranks, bundling.peers.rank, bundling.group
    runner = _Runner(module, step_fn, source, lambda: source.rank_part(rank, len(ranks), finding.step))
    is_culprit = rank == culprit
    first = gather_trees(attempt(runner.again) if is_culprit else None, name=_NAME, group=group)
    here = first[ranks.index(culprit)]
    if "error" in here:
        return f"Cause not found: rank {culprit} could not run the step again: {here['error']}"
    if here["other_step"] is not None:
        return _another_step(culprit, here)
    if cause_of(here["runs"], None) is Cause.TRANSIENT:
        return _differs(culprit, here)
    peer = _peer_of(culprit, ranks, finding.culprit_ranks, bundling.model_writers)
    mine = None
    if rank == peer:
        mine = attempt(lambda: runner.of_a_peer(_read_part(culprit, bundling.directory)))
    elif is_culprit:
        mine = attempt(runner.in_other_precision)
    second = dict(zip(ranks, gather_trees(mine, name=_NAME, group=group), strict=True))
    return _judged(culprit, peer, here, second[culprit], None if peer is None else second[peer])


@dataclass
class _Runner:
    """Runs parts of steps on copies of this rank's module. Local. ``content``: of this rank's own part."""

    module: nn.Module
    step_fn: Callable[[nn.Module, Any], Tensor]
    source: PartSource
    content: Callable[[], RankPart]
    run_sec: float = 0.0  # what the first run took

    @cached_property
    def _own(self) -> RankPart:
        return self.content()

    def again(self) -> dict[str, Any]:
        """This rank's own part, twice: the names of what was not finite, of each run."""
        patience, part = _Patience(), self._own
        started = time.monotonic()
        outcomes = [self._run(part, "captured")]
        self.run_sec = time.monotonic() - started
        while len(outcomes) < _RUNS and patience.allows(self.run_sec):
            outcomes.append(self._run(part, "captured"))
        different = [_difference(part, outcome) for outcome in outcomes]
        return {
            "runs": [outcome.nonfinite for outcome in outcomes],
            "other_step": different[0] if all(different) else None,
            "losses_known": all(_is_known(micro.loss) for micro in part.micro_batches),
            "batch": _nonfinite_inputs(part),
            "place": place_text(self.module),
        }

    def of_a_peer(self, part: RankPart) -> dict[str, Any]:
        """The culprit's part, on this device."""
        return {"runs": [self._run(part, "captured").nonfinite]}

    def in_other_precision(self) -> dict[str, Any]:
        """This rank's part in float32 and float64: what was not finite; None where it was not run."""
        patience, found = _Patience(), dict[str, Any]()
        for precision, slower in _SLOWER.items():
            factor = _SLOWER_GPU_FP64 if precision == "fp64" and device_of(self.module).type != "cpu" else slower
            found[precision] = None
            if patience.allows(factor * self.run_sec):
                found[precision] = self._run(self._own, precision).nonfinite
                if not found[precision]:
                    break
        return {"run_sec": self.run_sec, **found}

    def _run(self, part: RankPart, precision: str) -> Outcome:
        device = device_of(self.module)
        with alone("step_fn", device):
            model, parameters = copy.deepcopy(self.module), self.source.parameters()
            outcome = Rerun(model, self.step_fn, part, parameters, RunSettings(device, precision)).run()
        if outcome.error is not None:
            raise outcome.error
        return outcome


class _Patience:
    """How long the ranks that wait in the gather will go on waiting; they begin about now."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + patience_sec(config.timeout_sec(None))

    def allows(self, seconds: float) -> bool:
        return time.monotonic() + _SPARE * seconds < self._deadline


def _read_part(rank: int, directory: Path | None) -> RankPart:
    if directory is None:
        raise ConfigError("no bundle was written, from which a peer could read the batch")
    return Bundle.open(directory).rank_part(rank)


def _peer_of(
    culprit: int, ranks: tuple[int, ...], culprits: tuple[int, ...], model_writers: Mapping[int, int]
) -> int | None:
    """The next rank with the same parameters; one that saw no fault of its own, if there is one."""
    others = [rank for rank in from_rank_on(ranks, culprit)[1:] if model_writers[rank] == model_writers[culprit]]
    return next((rank for rank in others if rank not in culprits), others[0] if others else None)


def _nonfinite_inputs(part: RankPart) -> list[str]:
    found = []
    for place, micro in enumerate(part.micro_batches):
        for path, leaf in walk(from_plain(micro.batch)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                found.append(f"{path} of micro-batch {place}")
    return found


def _difference(part: RankPart, outcome: Outcome) -> str | None:
    """What was finite in the capture and is another number now, in words."""
    for place, (micro, loss) in enumerate(zip(part.micro_batches, outcome.losses, strict=False)):
        if micro.loss is not None and _is_known(micro.loss) and not _is_close(micro.loss, loss):
            return f"micro-batch {place}: the loss was {_number(micro.loss)}, and is {_number(loss)}"
    # Of norms only the first: later gradients may be added to reduced ones, which one rank alone does not get.
    then, now = part.micro_batches[0].norms, outcome.norms[0]
    if then is None or now is None:
        return None
    finite = then.isfinite()
    atol = _ATOL * float(then[finite].max()) if bool(finite.any()) else 0.0
    unlike = finite & ~torch.isclose(then, now, rtol=_RTOL, atol=atol)
    unlike |= finite & ((then == NO_GRADIENT) != (now == NO_GRADIENT))
    if not bool(unlike.any()):
        return None
    first = int(unlike.nonzero()[0])
    name = part.parameter_names[first]
    return f"micro-batch 0: the gradient of {name} {_norm_words(then[first])}, and now {_norm_words(now[first])}"


def _is_known(loss: Tensor | None) -> bool:
    return loss is not None and bool(loss.isfinite().all())


def _is_close(then: Tensor, now: Tensor) -> bool:
    one, other = then.double().flatten(), now.cpu().double().flatten()
    return one.shape == other.shape and torch.allclose(one, other, rtol=_RTOL, atol=0.0)


def _number(loss: Tensor) -> str:
    return f"{loss.item():g}" if loss.numel() == 1 else f"{loss.numel()} numbers"


def _norm_words(norm: Tensor) -> str:
    return "did not arrive" if norm == NO_GRADIENT else f"had norm {norm.item():g}"


def _another_step(culprit: int, here: Mapping[str, Any]) -> str:
    lines = [
        f"Cause not found: step_fn is not the step that was trained: run again on rank {culprit} from the same state, "
        f"{here['other_step']}. Let it return what backward() was called on, before a GradScaler's scale."
    ]
    if not all(here["runs"]):
        lines.append("Or a fault changed finite numbers, too: run again, the gradients are finite.")
    return "\n".join(lines)


def _differs(culprit: int, here: Mapping[str, Any]) -> str:
    runs = here["runs"]
    finite = sum(not names for names in runs)
    lines = [
        f"Cause: a race or a transient fault on rank {culprit}: run again from the same state, its gradients were "
        f"finite in {finite} of {len(runs)} runs."
    ]
    if finite == len(runs) and not here["losses_known"]:
        lines.append(
            "Or step_fn leaves out what made them: not every micro-batch has a finite loss to compare with the rerun's."
        )
    return "\n".join(lines)


def _judged(
    culprit: int,
    peer: int | None,
    here: Mapping[str, Any],
    precise: Mapping[str, Any],
    there: Mapping[str, Any] | None,
) -> str:
    again = f"run again from the same state, rank {culprit} gets non-finite gradients again"
    cause = cause_of(here["runs"], None if there is None or "error" in there else there["runs"][0])
    if there is None:
        lines = [f"Cause: {again}; no other rank has the same parameters, to tell its device from its software."]
    elif cause is Cause.UNTOLD:
        lines = [f"Cause: {again}; rank {peer} could not run it: {there['error']}"]
    elif cause is Cause.HARDWARE:
        return (
            f"Cause: hardware of rank {culprit} ({here['place']}), or something that only rank {culprit} holds "
            f"outside of parameters, buffers, batch and random state: {again}, and rank {peer} gets finite ones from "
            "these."
        )
    else:
        lines = [f"Cause: software or data: {again}, and so does rank {peer}."]
    found = here["batch"]
    batch = [f"The batch itself is not finite: {shorten(found, _SHOWN)}."] if found else []
    return "\n".join([*lines, _precision_text(precise), *batch])


def _precision_text(precise: Mapping[str, Any]) -> str:
    if "error" in precise:
        return f"In other precisions it could not be run: {precise['error']}"
    for precision, name in (("fp32", "float32 without autocast"), ("fp64", "float64")):
        if precise[precision] is None:
            took = f"one run took {precise['run_sec']:.1f} s, and {config.TIMEOUT_SEC} leaves no time for more"
            return f"In {name} it was not run: {took}."
        if not precise[precision]:
            return f"In {name} the gradients are finite: the numbers overflow, or lack digits, in the precision in use."
    return "Not finite in float32 and float64 either: the mathematics or the data, not the precision."
