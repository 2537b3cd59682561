"""Non-finite gradients in Hugging Face's Trainer: caught on the rank where they arise, before they are applied.

A TrainerCallback is not shown the batch, nor what the Trainer makes of the loss. So:

1. A micro-batch begins where the model is called, in training: its batch is the forward pass's keyword arguments. A
   forward pass that raises ends it, which is reported to the other ranks.
2. It ends at ``on_substep_end`` (gradients accumulate) or ``on_pre_optimizer_step``, where all ranks judge the step.
3. The Trainer divides the loss by the number of micro-batches, or by a count of tokens over all ranks, and multiplies
   it by the number of ranks: the factor is read off the backward pass, and kept with the batch.

The Trainer clips before ``on_pre_optimizer_step``. Culprits and their parameters are named all the same, for each rank
measures its own gradients as they arrive. But a sum over ranks that overflows has no culprit, and clipping may have
spread it to other gradients by then: such a verdict may name parameters besides those whose sum it was.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from ddpstats._rerun.record import MicroBatch
from ddpstats._rerun.state import Autocast
from ddpstats.errors import ConfigError
from ddpstats.integrations.capture_steps import TrainerCapture

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ConfigError(
        f"ddpstats.integrations.transformers needs transformers: {error}. pip install 'ddpstats[transformers]'"
    ) from error

__all__ = ["NaNCaptureCallback", "step"]


class NaNCaptureCallback(TrainerCapture, TrainerCallback):
    """`ddpstats.NaNCapture` in Hugging Face's Trainer: every rank's Trainer, or none.

    With ``on_nonfinite="stop"`` no rank applies the step, and every rank's Trainer stops after it, as if training was
    over: it may still evaluate and save. With "skip" the step is left out and the run goes on; with "continue" it is
    applied as it is. A step that is left out has no gradients (None), so the optimizer does nothing; the scheduler and
    ``global_step`` go on.

    Used as a context manager around ``train()``, the callback also closes the capture where ``train()`` raises, reports
    errors outside of the forward pass to the other ranks, and explains a connection that broke because another rank
    raised. Without, an error in the forward pass is reported too; but its peers end with the connection's own
    error, or, where that rank's process lives on, after some seconds with its name on stderr.

    Covered: DistributedDataParallel and a single process, gradient accumulation, mixed precision through accelerate.
    Not covered: DeepSpeed, and loss functions that call the model more than once (the first call's arguments are kept).

    Args:
        dirpath: where bundles go, a directory of their own each. All ranks must see the same file system.
        on_nonfinite, keep, store_batch: as `ddpstats.NaNCapture`.
        settings: further arguments of `ddpstats.NaNCapture`: ``max_bytes``, ``max_scaler_skips``, ``group``, ...

    Attributes:
        verdict: the last one that was not ok; of several in a row the first, which has the bundle. None if all were.

    Raises, out of ``train()``: as `ddpstats.NaNCapture.check`, on every rank.

    Replay: ``ddpstats replay BUNDLE --model PKG:FACTORY --step ddpstats.integrations.transformers:step``. The factory
    returns the model that the Trainer was given.

    Example::

        with NaNCaptureCallback("captures") as stopper:
            Trainer(model, args, train_dataset=data, callbacks=[stopper]).train()
        stopper.verdict     # rank 0 and rank 1: culprit_ranks (1,), where rank 1's batch made the NaN
    """

    _began = False  # a micro-batch, in the forward pass that is running
    _handles: tuple[Any, ...] = ()

    def __enter__(self) -> NaNCaptureCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = self._steps.end(error)
        self._close()
        if reason is not None:
            raise reason from error

    # -- what the Trainer calls ---------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._close()
        model = named["model"]
        self._steps.start(model, getattr(named["optimizer"], "scaler", None))
        self._handles = (
            model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after_forward, always_call=True),
        )

    def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._steps.end()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        verdict = self._steps.check()
        if verdict is not None and verdict.should_stop:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._close()

    # -- what the model calls -----------------------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, args: Any, named: dict[str, Any]) -> None:
        steps = self._steps
        if steps.micro is None and module.training and torch.is_grad_enabled():
            micro = steps.begin(named)
            self._began = micro is not None
            if micro is not None:
                _note_autocast(micro, module)

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        began, self._began = self._began, False
        if not began:
            return
        error = sys.exc_info()[1]
        if output is None and error is not None:
            self._steps.end(error)
        else:
            self._steps.note_loss(_loss_in(output))

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._began, self._handles = False, ()
        self._steps.close()


def step(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The model's loss for ``ddpstats replay --step``: ``model(**batch).loss``. Local.

    What the Trainer multiplied it by is in the bundle and applied by replay, so gradients come out bit for bit. With a
    ``compute_loss`` or ``compute_loss_func`` of your own, or label smoothing, the model's own loss is not what was
    differentiated: write a function like this. ``batch`` has what the model was called with.
    """
    loss = _loss_in(model(**batch))
    if not isinstance(loss, torch.Tensor):
        raise ConfigError("the model returns no loss for this batch: write a step function of your own for --step")
    return loss


def _loss_in(output: Any) -> Any:
    """Return the loss as `Trainer.compute_loss` finds it, or None."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return output[0] if isinstance(output, (tuple, list)) and output else None


def _note_autocast(micro: MicroBatch, module: torch.nn.Module) -> None:
    """accelerate puts autocast into the module's ``forward``, where it is too late to ask torch for it."""
    if not hasattr(module, "_original_forward"):
        return
    precision = importlib.import_module("accelerate.state").AcceleratorState().mixed_precision
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(precision))
    parameter = next(module.parameters(), None)
    if dtype is not None and parameter is not None:
        micro.autocast = Autocast(parameter.device.type, True, dtype)


# -- a StatsWindow in the Trainer's own rows ---------------------------------------------------------------------------

WINDOW_RELIES_ON = ("log", "control.should_log")


def attach_window(trainer: Any, flush: Callable[[], dict[str, float]]) -> None:
    """Flush a window into the rows that ``trainer`` logs; see `ddpstats.integrations.loggers.write_window`.

    A callback would come too late: those of ``report_to`` are called before a user's, and the history is written.
    """
    log = trainer.log

    @functools.wraps(log)
    def log_with_window(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "total_flos" in logs:  # the last row of training, whose metrics train() returns
            rest = flush()
            if rest:
                log(_join({}, rest), *args, **kwargs)
        elif "loss" in logs and trainer.control.should_log:  # neither evaluation nor what a user logs
            logs = _join(logs, flush())
        log(logs, *args, **kwargs)

    trainer.log = log_with_window


def _join(logs: dict[str, float], scalars: dict[str, float]) -> dict[str, float]:
    taken = sorted(scalars.keys() & {*logs, "epoch", "step"})
    if taken:
        raise ConfigError(
            f"the Trainer logs {taken[0]!r} itself, and so would the window: give write_window a prefix, such as "
            "prefix='window/', or rename it in window.add"
        )
    return {**logs, **scalars}
