"""`NaNCapture`: one optimizer step after the other, watched and kept, and judged by all ranks together.

1. `micro_batch` keeps the batch and the random state (`step_record`) and watches the gradients as they arrive, before
   they are reduced (`_observe.gradients`).
2. `check` asks of all ranks (`_ask`), alone or with others in one all_reduce: on how many was something not finite, now
   or before the reduce? On none: the step is forgotten.
3. Otherwise all ranks tell what they saw, come to one verdict (`verdict`), write their parts of a bundle (`bundle`),
   and with ``attribute=True`` look for the cause by running the step again (`_attribution`).
4. A rank that raises inside `micro_batch` will not come to `check`: it says so through the store (`_peers`), and writes
   what it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, get_args

import torch

from ddpstats._base import marks
from ddpstats._base.config import check_choice, check_count
from ddpstats._base.lazy import breaks_graph
from ddpstats._base.text import ranks_text
from ddpstats._observe.gradient_norms import any_bad
from ddpstats._observe.gradients import GradientWatch
from ddpstats._ranks.calls import channel_of
from ddpstats._ranks.step import ask_all
from ddpstats._rerun.codec import CannotStore, to_plain
from ddpstats._rerun.record import MicroBatch, Running, StepRecord, StepWatch, checked_step, scale_of
from ddpstats._rerun.run import Reruns
from ddpstats.capture._peers import Peers
from ddpstats.capture.attribution import attribute_cause
from ddpstats.capture.bundle import AloneBundle, BundleWriter
from ddpstats.capture.manifest import bundle_name
from ddpstats.capture.parts import PartSource
from ddpstats.capture.verdict import CaptureFinding, CaptureVerdict, Policy, Report, find, report_of
from ddpstats.errors import BundleError, ConfigError

_logger = logging.getLogger("ddpstats")


class NaNCapture(StepWatch):
    """Catches non-finite gradients before they are applied, on the rank where they arise, with all it takes to replay.

    Every rank of ``group`` must make one, and call `check` once per optimizer step: also a rank that has no batch.
    Nothing of the training changes: no random number is drawn and no gradient touched. Gradients are judged, not
    losses: a loss that is NaN while every gradient is finite harms no parameter. Parameters that the module gets later
    are not watched.

    Args:
        dirpath: where bundles go, a directory of their own each. All ranks must see the same file system.
        model: the module as it is trained: DistributedDataParallel itself, not what is inside.
        optimizer, scheduler: accepted, and not kept: a replay needs no state of theirs, and checkpoints have it.
        scaler: a ``torch.amp.GradScaler``. A step that it skips is no capture; ``max_scaler_skips`` in a row are.
        group: the process group; None is the default one. Without any, this process is alone.
        keep: how many complete bundles are kept; the oldest go.
        on_nonfinite: what the verdict tells the caller to do: "stop", "skip" or "continue". It only tells.
        max_bytes: how large a bundle may get, all ranks together. None: any.
        max_scaler_skips: see ``scaler``.
        store_batch: False leaves batches out of bundles, for those that may not be written or cannot.
        attribute: find out the cause of a capture by running the step again, here and on a peer; needs ``step_fn``.
        step_fn: called as ``step_fn(model, batch)``, returns the loss.

    Raises:
        ConfigError: an argument that cannot work; on this rank only.

    Example::

        capture = NaNCapture("captures", model=ddp, optimizer=optimizer)
        for batch in loader:
            with capture.micro_batch(batch):
                loss = loss_fn(ddp(batch["x"]), batch["y"])
                loss.backward()
            verdict = capture.check()       # every rank: the same verdict
            if verdict.should_stop:
                break                       # rank 1 saw the NaN, all ranks are here
            if not verdict.should_skip:
                optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        dirpath: str | Path,
        *,
        model: torch.nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        group: Any = None,
        keep: int = 3,
        on_nonfinite: Policy = "stop",
        max_bytes: int | None = None,
        max_scaler_skips: int = 16,
        store_batch: bool = True,
        attribute: bool = False,
        step_fn: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model={type(model).__name__}: a torch.nn.Module is needed")
        check_choice("on_nonfinite", on_nonfinite, get_args(Policy))
        check_count("keep", keep, 1)
        check_count("max_scaler_skips", max_scaler_skips, 1)
        if max_bytes is not None:
            check_count("max_bytes", max_bytes, 1)
        if attribute and not callable(step_fn):
            raise ConfigError("attribute=True needs step_fn=: a function (model, batch) that returns the loss")
        super().__init__("NaNCapture.check", group)
        self.dirpath = Path(dirpath)
        self._scaler = scaler
        self._keep, self._policy, self._max_bytes = keep, on_nonfinite, max_bytes
        self._max_scaler_skips, self._store_batch = max_scaler_skips, store_batch
        self._step_fn = step_fn if attribute else None
        self._watch = GradientWatch(model)
        self._record = StepRecord(model)
        self._source = PartSource(self._watch, self._record, scaler, store_batch)
        self._peers = Peers(channel_of(group))
        self._scaler_skips = 0
        self._captured_before = False  # in the step before this one
        self._batches_checked = False
        self._closes(self._watch.close, self._record.close, self._peers.close)

    @property
    def step(self) -> int:
        """The number of the step under way: counted from 0, or on from what `check` was last told."""
        return self._step

    def micro_batch(self, batch: Any) -> _RunningMicroBatch:
        """A context manager around the forward and backward pass of one micro-batch. Local.

        It gives a `MicroBatch`, whose ``loss`` the caller may set: replay then compares it.

        Args:
            batch: what the step works on, in nested dicts, lists, tuples and dataclasses: tensors (kept by reference),
                arrays of numpy, numbers, strings. Enter after it is loaded and, if it is moved, on its device.

        Raises:
            ConfigError: inside another micro-batch, or after `close`.
            RankMissing: in place of the broken connection's error, where another rank raised inside its micro-batch.
        """
        return _RunningMicroBatch(self, batch)

    @breaks_graph
    def check(self, *, step: int | None = None) -> CaptureVerdict:
        """Judge the step: after the last ``backward()`` (and ``scaler.unscale_``), before ``optimizer.step()``.

        Collective: every rank of the group must call, once per optimizer step. One small all_reduce where all is well.

        Args:
            step: the caller's own number of the step; by default steps are counted from 0.

        Raises:
            BundleError: some rank's batch cannot be stored; on every rank, at its first step.
            ConfigError: ranks made their captures with different settings; on every rank, at its first step.
            InvalidStats: some rank could not look at its gradients; on every rank.
            ProtocolMismatch, RankMissing: as `ddpstats.StatsReducer`.
        """
        self._refuse_to_judge()
        if step is not None:
            checked_step(step, self._method)
        verdict: CaptureVerdict = ask_all(f"{self._method}()", [self], step, self._group)[0]
        return verdict

    # -- as a question, by itself or among others ----------------------------------------------------------------------

    def _ask(self, step: int | None) -> tuple[float, float]:
        """(whether settings are still to be agreed on, whether this rank saw anything wrong)"""
        self._refuse_to_judge()
        if step is not None:
            self._step = checked_step(step, self._method)
        return float(not self._agreed), float(self._look())

    def _answer(self, sums: Sequence[float], group: Any) -> CaptureVerdict:
        strangers, seen = sums
        try:
            if strangers:
                self._agree_on_settings()
            verdict = self._settle() if seen else CaptureVerdict(self._step)
        finally:
            self._drop()
        if not seen:
            self._scaler_skips, self._captured_before = 0, False
        self._step += 1
        return verdict

    # -- one micro-batch ----------------------------------------------------------------------------------------------

    def _begin(self, running: _RunningMicroBatch, batch: Any) -> MicroBatch:
        self._refuse_micro_batch()
        self._peers.refuse_if_ended()
        found = self._record.begin(batch)
        if not self._batches_checked:
            self._check_batch(found)
        self._watch.begin()
        self._peers.enter()
        self._running = running
        return found

    def _check_batch(self, micro: MicroBatch) -> None:
        """Once: can it be stored? `check` says so on every rank if not: here, one rank alone would know."""
        self._batches_checked = True
        if self._store_batch:
            try:
                to_plain(micro.batch)
            except Exception as error:  # also what the batch's own classes raise
                self._problem = error

    def _end(self, error: BaseException | None) -> BaseException | None:
        """What to raise in place of ``error``; None leaves that."""
        self._running = None
        self._peers.leave()
        try:
            self._watch.end()
            self._record.end()
        except Exception as problem:  # the program's own error comes first; every rank hears of this one in `check`
            self._problem = problem
        if error is None:
            return None
        told = self._peers.explain(error)
        if told is None and isinstance(error, Exception) and not self._peers.is_lost_connection(error):
            self._leave(error)
        return told

    def _discard(self) -> None:
        self._end(None)
        self._record.micro_batches.pop()
        self._watch.arrivals.pop()

    def _leave(self, error: Exception) -> None:
        """This rank raised and its peers must not wait for it. What it has is written without them."""
        where = f"step {self._step}, micro-batch {len(self._record.micro_batches) - 1}"
        path = self.dirpath / bundle_name(self._step, datetime.now(timezone.utc), int(self._peers.rank))
        bundle = AloneBundle(path, self._source, error, self._step, self._peers, self._keep, self._max_bytes)
        bundle.write()
        self._peers.announce(error, where, bundle.directory)
        note = bundle.finish()
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(note)

    # -- one step -----------------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Whether this rank saw anything wrong. An error while looking is kept, and `_told` raises it on all ranks."""
        if self._problem is not None:
            return True
        try:
            if self._watch.bad:
                return True
            away = [norms for arrivals in self._watch.arrivals for norms in arrivals.away()]
            return any_bad([parameter.grad for parameter in self._watch.parameters], away)
        except Exception as error:
            self._problem = error
            return True

    def _agree_on_settings(self) -> None:
        settings = {
            "on_nonfinite": self._policy,
            "keep": self._keep,
            "max_bytes": self._max_bytes,
            "max_scaler_skips": self._max_scaler_skips,
            "attribute": self._step_fn is not None,
        }
        self._agree_on(settings, "Every rank must make it alike.")

    def _settle(self) -> CaptureVerdict:
        """Some rank saw something: all tell what, and do the same."""
        told = self._gathered(self._told, "what each rank saw")
        _refuse_problems(told)
        reports = {rank: Report.from_tree(tree["report"]) for rank, tree in told.items()}
        self._scaler_skips += any(report.scale is not None for report in reports.values())
        finding = find(reports, self._scaler_skips, self._max_scaler_skips)
        if finding.kind in ("ok", "scaler_skip"):
            self._captured_before = False
            return finding.verdict(self._policy, None)
        if self._captured_before:  # what follows from it would only push the first bundle out
            verdict = finding.verdict(self._policy, None, ("Not captured: the step before this one was.",))
        else:
            verdict = self._captured(finding)
        self._captured_before = True
        marks.publish(verdict.kind, verdict.message, step=verdict.step, ranks=tuple(map(int, verdict.culprit_ranks)))
        if self._peers.rank == min(self._peers.ranks):
            _logger.error("%s", verdict.message)
        return verdict

    def _captured(self, finding: CaptureFinding) -> CaptureVerdict:
        """Write a bundle, look for the cause, and say all of it."""
        bundling = BundleWriter(self.dirpath, self._keep, self._max_bytes, self._group, self._peers, finding)
        bundling.write(self._source)
        verdict = bundling.finish(finding.verdict(self._policy, bundling.directory, bundling.notes()))
        if self._step_fn is None:
            return verdict
        reruns = Reruns(self._record, self._step_fn, "step_fn", lambda: scale_of(self._scaler) or 1.0)
        cause = attribute_cause(
            reruns, self._norms(), self._gathered, self._rank, finding, bundling.model_writers, bundling.directory
        )
        if cause is None:
            return verdict
        return bundling.amended(replace(verdict, attribution=cause, message=f"{verdict.message}\n{cause}"))

    def _norms(self) -> dict[str, torch.Tensor]:
        """Norms of the gradients by name; none of several micro-batches, where gradients may be reduced already."""
        arrivals = self._watch.arrivals
        norms = arrivals[0].norms() if len(arrivals) == 1 else None
        return {} if norms is None else dict(zip(self._watch.names, norms, strict=True))

    def _told(self) -> dict[str, Any]:
        """What this rank saw. Raises what went wrong here; then every rank raises it."""
        if isinstance(self._problem, CannotStore):
            return {"problem": str(self._problem)}
        if self._problem is not None:
            raise self._problem
        return {"report": report_of(self._watch, self._scaler, self._step).to_tree()}

    def _drop(self) -> None:
        """The step is over, whatever became of it."""
        self._problem = None
        self._record.clear()
        self._watch.forget()


class _RunningMicroBatch(Running[MicroBatch]):
    def __init__(self, capture: NaNCapture, batch: Any) -> None:
        super().__init__(capture, batch)
        self._capture = capture

    def discard(self) -> None:
        """Leave in place of ``__exit__``, as if it had never been entered: the batch was not run after all. Local."""
        self._capture._discard()


def _refuse_problems(details: Mapping[int, Mapping[str, Any]]) -> None:
    problems = {rank: tree["problem"] for rank, tree in details.items() if "problem" in tree}
    if problems:
        lines = ["a batch cannot be stored in a bundle:"]
        lines += [f"  {ranks_text([rank])}: {text}" for rank, text in problems.items()]
        lines.append("Hand micro_batch() what can be stored, or leave batches out: NaNCapture(..., store_batch=False).")
        raise BundleError("\n".join(lines), ranks=problems)
