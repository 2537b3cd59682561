"""`NaNCapture` for trainers that call hooks, where no ``with`` statement can enclose a micro-batch.

`CaptureSteps` is a `NaNCapture` with its running micro-batch; `TrainerCapture` is what our callbacks have in common.

Trainers weight the model's loss, divide it by the number of micro-batches, or by tokens that they counted on all ranks,
before ``backward()``; a replay has the model and its batch alone. So `note_loss` puts a hook on the loss that the model
returned. In the backward pass it gets the derivative of what the trainer made of it: the factor, bit for bit, however
it came about, and without a wait. The bundle has it, and replay applies it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddpstats._observe.gradients import unwrap
from ddpstats._rerun.record import MicroBatch
from ddpstats.capture import CaptureVerdict, NaNCapture
from ddpstats.capture.verdict import Policy
from ddpstats.errors import RankMissing

_logger = logging.getLogger("ddpstats")


class CaptureSteps:
    """One rank's capture and its running micro-batch. Before `start`, and after `close`, all of it does nothing.

    Args:
        dirpath, settings: as `NaNCapture`.

    Attributes:
        verdict: the last one that was not ok; of several in a row the first, which has the bundle.
        micro: the micro-batch that is running; None between them.
    """

    def __init__(self, dirpath: Path, settings: Mapping[str, Any]) -> None:
        self.verdict: CaptureVerdict | None = None
        self.micro: MicroBatch | None = None
        self._dirpath, self._settings = dirpath, settings
        self._capture: NaNCapture | None = None
        self._model: Any = None
        self._scaler: Any = None
        self._running: Any = None
        self._was_ok = True

    def start(self, model: torch.nn.Module, scaler: Any) -> None:
        """Begin a training of this model, and end what was before."""
        self.close()
        self._capture = NaNCapture(self._dirpath, model=model, scaler=scaler, **self._settings)
        self._model, self._scaler = unwrap(model), scaler
        self.verdict, self._was_ok = None, True

    def begin(self, batch: Any) -> MicroBatch | None:
        """Begin a micro-batch, and end the one before it."""
        self.end()
        if self._capture is not None:
            running = self._capture.micro_batch(batch)
            self.micro = running.__enter__()
            self._running = running
        return self.micro

    def end(self, error: BaseException | None = None) -> RankMissing | None:
        """End the running micro-batch, if there is one; ``error`` is reported to the other ranks.

        Returns what another rank reported as the reason for it.
        """
        running, self._running, self.micro = self._running, None, None
        if running is None:
            return None
        try:
            running.__exit__(type(error) if error is not None else None, error, None)
        except RankMissing as reason:
            return reason
        return None

    def discard(self) -> None:
        """Forget the running micro-batch, if there is one: its batch was not run after all."""
        running, self._running, self.micro = self._running, None, None
        if running is not None:
            running.discard()

    def check(self) -> CaptureVerdict | None:
        """End the micro-batch and judge the step; a step to be left out loses its gradients. Collective."""
        self.end()
        if self._capture is None:
            return None
        verdict = self._capture.check()
        if self._was_ok and not verdict.ok:
            self.verdict = verdict
        self._was_ok = verdict.ok
        if verdict.should_skip:
            for parameter in self._model.parameters():
                parameter.grad = None
        return verdict

    def note_loss(self, loss: Any) -> None:
        """Watch ``loss``, which the model returned for this micro-batch; see the head of this file. Local."""
        micro = self.micro
        if micro is None or not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return
        value = loss.detach().clone()  # trainers scale it in place
        scaled = self._scaler is not None and self._scaler.is_enabled()

        def keep_factor(gradient: torch.Tensor) -> None:
            micro.factor = gradient.detach()
            if not scaled:
                micro.loss = (value * gradient).sum()

        loss.register_hook(keep_factor)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the micro-batch, take all hooks away. Idempotent."""
        self.end()
        capture, self._capture = self._capture, None
        self._model = self._scaler = None
        if capture is not None:
            capture.close()


class TrainerCapture:
    """One trainer's `CaptureSteps`, with the arguments and the verdict that users see."""

    def __init__(
        self,
        dirpath: str | Path,
        *,
        on_nonfinite: Policy = "stop",
        keep: int = 3,
        store_batch: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.dirpath = Path(dirpath)
        settings.update(on_nonfinite=on_nonfinite, keep=keep, store_batch=store_batch)
        self._steps = CaptureSteps(self.dirpath, settings)

    @property
    def verdict(self) -> CaptureVerdict | None:
        """The last one that was not ok."""
        return self._steps.verdict


def explain(error: BaseException, reason: RankMissing | None) -> None:
    """Add another rank's reason to an error that this module may not replace."""
    if reason is None:
        return
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"{reason}")
    _logger.error("%s", reason)
