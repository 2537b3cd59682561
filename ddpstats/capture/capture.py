"""`NaNCapture`: one optimizer step after the other, watched and kept, and judged by all ranks together.

1. `micro_batch` keeps the batch and the random state (`_rerun.record`) and watches the gradients as they arrive, before
   they are reduced (`_observe.gradients`).
2. `check` asks all ranks (`_ask`), alone or with others in one all_reduce: on how many was something not finite, now or
   before the reduce? On none: the step is forgotten.
3. Otherwise all ranks gather what they saw, come to one verdict (`verdict`), write their files of a bundle (`bundle`),
   and with ``attribute=True`` look for the cause by running the step again.
4. A rank that raises inside `micro_batch` writes its part into another bundle, and a note into the group's store.
   It may catch the exception and go on: its next call takes the note back. If the exception leaves the capture, too,
   or the other ranks miss this one in `check` or as their connection to it breaks, `RankMissing` has the note's text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch

from ddpstats._base import marks
from ddpstats._base.config import check_choice, check_count
from ddpstats._base.lazy import breaks_graph
from ddpstats._base.text import ranks_text
from ddpstats._observe.gradient_norms import any_bad
from ddpstats._observe.gradients import GradientWatch
from ddpstats._ranks.calls import channel_of
from ddpstats._ranks.failure import LOST_BY_BACKEND, nccl_reason
from ddpstats._ranks.step import ask_all
from ddpstats._rerun.codec import CannotStore, to_plain
from ddpstats._rerun.record import MicroBatch, Running, StepRecord, StepWatch, check_step, scale_of
from ddpstats._rerun.run import Reruns
from ddpstats.capture.bundle import BundleWriter, PartSource
from ddpstats.capture.verdict import CaptureVerdict, Policy, Report, find, find_cause, report_of
from ddpstats.errors import BundleError, ConfigError, RankMissing

_logger = logging.getLogger("ddpstats")
_POLICY_TEXT = {
    "stop": "on_nonfinite='stop': every rank should stop before its optimizer takes this step.",
    "skip": "on_nonfinite='skip': every rank should leave this step out and go on.",
    "continue": "on_nonfinite='continue': every rank takes the step as it is.",
}


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
        on_nonfinite: what the verdict advises: "stop", "skip" or "continue". The caller acts on it.
        max_bytes: how large a bundle may get, all ranks together. None: any.
        max_scaler_skips: see ``scaler``.
        store_batch: False leaves batches out of bundles, for those that may not be written or cannot.
        attribute: find out the cause of a capture by running the step again, here and on a peer; needs ``step_fn``.
        step_fn: called as ``step_fn(model, batch)``, returns the loss.

    Raises:
        ConfigError: an argument that cannot work; on this rank only.

    Example::

        capture = NaNCapture("captures", model=ddp)
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
        self._channel = channel_of(group)
        self.dirpath = Path(dirpath)
        self._scaler = scaler
        self._keep, self._policy, self._max_bytes = keep, on_nonfinite, max_bytes
        self._max_scaler_skips, self._store_batch = max_scaler_skips, store_batch
        self._step_fn = step_fn if attribute else None
        self._watch = GradientWatch(model)
        self._record = StepRecord(model)
        self._source = PartSource(self._watch, self._record, scaler, store_batch)
        self._scaler_skips = 0
        self._has_captured = False  # in the step before this one
        self._batches_checked = False
        self._closes(self._watch.close, self._record.close)

    @property
    def step(self) -> int:
        """The number of the step under way: counted from 0, or on from what `check` was last given."""
        return self._step

    def micro_batch(self, batch: Any) -> _RunningMicroBatch:
        """Return a context manager around the forward and backward pass of one micro-batch. Local.

        It gives a `MicroBatch`, whose ``loss`` the caller may set: replay then compares it. A micro-batch that an
        exception leaves is no part of the step. The program may catch it and go on, and calls `check` for this step as
        all ranks do; where a rank leaves out that call, its next one is paired with the others' call for this step.

        Args:
            batch: what the step works on, in nested dicts, lists, tuples and dataclasses: tensors (kept by reference),
                arrays of numpy, numbers, strings. Enter after it is loaded and, if it is moved, on its device.

        Raises:
            ConfigError: inside another micro-batch, or after `close`.
            RankMissing: in place of a broken connection's error, where another rank raised inside its micro-batch.
        """
        return _RunningMicroBatch(self, batch)

    def __exit__(self, *exc: object) -> None:
        """Close. An exception of a micro-batch that leaves the capture, too, is the end of this rank's part."""
        if any(exc):
            self._channel.leave_by_note()
        super().__exit__(*exc)

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
            check_step(step, self._method)
        verdict: CaptureVerdict = ask_all(f"{self._method}()", [self], step, self._group)[0]
        return verdict

    # -- as a question, by itself or among others ----------------------------------------------------------------------

    def _ask(self, step: int | None) -> tuple[float, float]:
        """Return whether settings are still to be agreed on, and whether this rank saw anything wrong."""
        self._refuse_to_judge()
        if step is not None:
            self._step = check_step(step, self._method)
        return float(not self._agreed), float(self._look())

    def _answer(self, sums: Sequence[float], group: Any) -> CaptureVerdict:
        newcomers, seen = sums
        try:
            if newcomers:
                self._agree_on_settings()
            verdict = self._settle() if seen else CaptureVerdict(self._step)
        finally:
            self._drop()
        self._channel.note("")  # not before: another rank may wait for what this one has left out
        if not seen:
            self._scaler_skips, self._has_captured = 0, False
        self._step += 1
        return verdict

    # -- one micro-batch ----------------------------------------------------------------------------------------------

    def _begin(self, running: _RunningMicroBatch, batch: Any) -> MicroBatch:
        self._refuse_micro_batch()
        micro = self._record.begin(batch)
        if not self._batches_checked:
            self._check_batch(micro)
        self._watch.begin()
        self._running = running
        return micro

    def _check_batch(self, micro: MicroBatch) -> None:
        """Look once whether a batch can be stored. If not, `check` raises on every rank; here, one alone would know."""
        self._batches_checked = True
        if self._store_batch:
            try:
                to_plain(micro.batch)
            except Exception as error:  # also what the batch's own classes raise
                self._problem = error

    def _end(self, error: BaseException | None) -> BaseException | None:
        """Return what to raise in place of ``error``; None leaves that."""
        self._running = None
        try:
            self._watch.end()
            self._record.end()
        except Exception as problem:
            self._problem = problem if error is None else self._problem  # the program's own error comes first
        if error is None:
            return None
        try:
            if isinstance(error, Exception) and not isinstance(error, RankMissing):
                if is_lost_connection(error):
                    return self._channel.explain(error)
                self._write_alone(error)
            return None
        finally:
            self._forget_micro_batch()

    def _forget_micro_batch(self) -> None:
        self._record.drop_last()
        del self._watch.arrivals[len(self._record.micro_batches) :]

    def _discard(self) -> None:
        self._end(None)
        self._forget_micro_batch()

    def _write_alone(self, error: Exception) -> None:
        """Write what this rank has of the step, and a note for the ranks that may miss it."""
        where = f"step {self._step}, micro-batch {len(self._record.micro_batches) - 1}"
        reason = f"rank {self._rank} raised in {where}: {type(error).__name__}: {error}"
        self._channel.note(reason)  # first: what follows may wait for the device without end
        writer = self._writer_of(CaptureVerdict(self._step, culprit_ranks=(self._rank,), message=reason))
        saved = "What it had of that step"
        text = writer.write_alone(error, lambda bundle: self._channel.note(f"{reason}\n{saved}: {bundle}"))
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(text)

    # -- one step -----------------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Return whether this rank saw anything wrong. `_report` raises an error while looking on all ranks."""
        if self._problem is not None:
            return True
        try:
            self._wait_for_devices(parameter.device for parameter in self._watch.parameters)
            if self._watch.bad:
                return True
            away = [norms for arrivals in self._watch.arrivals for norms in arrivals.norms_on_accelerator()]
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
        self._agree_on(settings, "Every rank must make it with the same ones.")

    def _settle(self) -> CaptureVerdict:
        """Come to a verdict with all ranks, of which some saw something."""
        trees = self._gather(self._report, "what each rank saw")
        _refuse_problems(trees)
        reports = {rank: msgspec.convert(tree["report"], Report) for rank, tree in trees.items()}
        self._scaler_skips += any(report.scale is not None for report in reports.values())
        verdict = find(reports, self._scaler_skips, self._max_scaler_skips)
        if verdict.ok:
            self._has_captured = False
            return verdict
        if self._has_captured:  # what follows from it would only push the first bundle out
            verdict = self._add_policy(verdict, None, ["Not captured: the step before this one was."])
        else:
            verdict = self._write_capture(verdict)
        self._has_captured = True
        marks.publish(verdict.kind, verdict.message, step=verdict.step, ranks=tuple(map(int, verdict.culprit_ranks)))
        if self._rank == min(self._ranks):
            _logger.error("%s", verdict.message)
        return verdict

    def _add_policy(self, verdict: CaptureVerdict, bundle: Path | None, notes: Sequence[str]) -> CaptureVerdict:
        """Add what to do, and the lines about the bundle."""
        message = "\n".join([verdict.message, *notes, _POLICY_TEXT[self._policy]])
        stop, skip = self._policy == "stop", self._policy != "continue"
        return replace(verdict, bundle=bundle, should_stop=stop, should_skip=skip, message=message)

    def _write_capture(self, verdict: CaptureVerdict) -> CaptureVerdict:
        """Write a bundle, look for the cause, and say all of it."""
        writer = self._writer_of(verdict)
        writer.write()
        verdict = writer.finish(self._add_policy(verdict, writer.directory, writer.lines()))
        if self._step_fn is None:
            return verdict
        reruns = Reruns(self._record, self._step_fn, "step_fn", lambda: scale_of(self._scaler) or 1.0)
        cause = find_cause(reruns, self._norms(), self._gather, self._rank, verdict, writer.model_writers)
        if cause is None:
            return verdict
        return writer.amend(replace(verdict, attribution=cause, message=f"{verdict.message}\n{cause}"))

    def _writer_of(self, finding: CaptureVerdict) -> BundleWriter:
        settings = (self.dirpath, self._keep, self._max_bytes)
        return BundleWriter(*settings, self._group, self._channel, self._source, finding)

    def _norms(self) -> dict[str, torch.Tensor]:
        """Return norms by name; none of several micro-batches, where gradients may be reduced already."""
        arrivals = self._watch.arrivals
        norms = arrivals[0].norms() if len(arrivals) == 1 else None
        return {} if norms is None else dict(zip(self._watch.names, norms, strict=True))

    def _report(self) -> dict[str, Any]:
        """Return what this rank saw. Raises what went wrong here; then every rank raises it."""
        if isinstance(self._problem, CannotStore):
            return {"problem": str(self._problem)}
        if self._problem is not None:
            raise self._problem
        return {"report": asdict(report_of(self._watch, self._scaler, self._step))}

    def _drop(self) -> None:
        """Let go of the step, which is over."""
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


def _refuse_problems(trees: Mapping[int, Mapping[str, Any]]) -> None:
    problems = {rank: tree["problem"] for rank, tree in trees.items() if "problem" in tree}
    if problems:
        lines = ["a batch cannot be stored in a bundle:"]
        lines += [f"  {ranks_text([rank])}: {text}" for rank, text in problems.items()]
        lines.append("Give micro_batch() what can be stored, or leave batches out: NaNCapture(..., store_batch=False).")
        raise BundleError("\n".join(lines), ranks=problems)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error is of the connection to another rank, and not of this rank's own step."""
    return isinstance(error, RuntimeError) and LOST_BY_BACKEND.search(nccl_reason(str(error))) is not None
