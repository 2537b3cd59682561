"""Non-finite gradients in Lightning: caught before the optimizer applies them, on every rank in the same step.

Lightning's own hooks are all it takes, and nothing is patched:

===========================  ==========================================================================================
on_train_start               `NaNCapture` is made, with the module as the strategy wraps it
on_train_batch_start         a micro-batch begins: the batch is on its device, nothing of it has been run
on_before_backward           its loss is kept, as Lightning differentiates it
on_before_optimizer_step     it ends, and all ranks judge the step: gradients are unscaled and not yet clipped
on_train_batch_end           it ends, where gradients only accumulate; the step goes on
on_exception                 it ends with that error: the other ranks are told, or told why they lost touch
on_train_end                 hooks and thread go
===========================  ==========================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ddpstats.integrations.capture_steps import TrainerCapture, explain
from ddpstats.integrations._lightning_copies import Callback


class DdpstatsNaNCapture(TrainerCapture, Callback):  # type: ignore[misc]  # a class found at run time
    """`ddpstats.NaNCapture` in a Lightning trainer: every rank's trainer, or none.

    With ``on_nonfinite="stop"`` no rank applies the step, and every rank's trainer stops after this batch: as with
    Lightning's EarlyStopping not before ``min_epochs`` and ``min_steps``, until which such steps are left out. With
    "skip" the step is left out and the run goes on; with "continue" it is applied as it is. A step that is left out
    has no gradients (None), so the optimizer does nothing; schedulers and ``global_step`` go on, as in Lightning's own
    skips under a GradScaler.

    Covered: automatic optimization with ``accumulate_grad_batches``, clipping, mixed precision, any strategy that
    leaves the module's own parameters in place; also optimizers that call the closure repeatedly. Manual optimization
    with one or more optimizers: each ``optimizer.step()`` of a LightningOptimizer is judged as a step of its own. The
    first one of a batch can be replayed; for those after it the bundle holds the batch, but the random state of the
    moment of their backward pass. Manual ``loss.backward()`` without ``self.manual_backward`` is seen too, but not
    after the first step of a batch. Not covered: strategies whose engine steps by itself (DeepSpeed).

    Args:
        dirpath: where bundles go, a directory of their own each. All ranks must see the same file system.
        on_nonfinite, keep, store_batch: as `ddpstats.NaNCapture`.
        settings: further arguments of `ddpstats.NaNCapture`: ``max_bytes``, ``max_scaler_skips``, ``group``, ...

    Attributes:
        verdict: the last one that was not ok; of several in a row the first, which has the bundle. None if all were.

    Raises, in the hooks: as `ddpstats.NaNCapture.check`, on every rank.

    Replay: ``ddpstats replay BUNDLE --model PKG:FACTORY --step ddpstats.integrations.lightning:step``. The factory
    returns the LightningModule itself.

    Example::

        stopper = DdpstatsNaNCapture("captures")
        Trainer(devices=2, callbacks=[stopper]).fit(module, loader)
        stopper.verdict     # rank 0 and rank 1: culprit_ranks (1,), where rank 1's batch made the NaN
    """

    _batch: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        model = trainer.strategy.model
        self._steps.start(
            pl_module if model is None else model,
            getattr(trainer.precision_plugin, "scaler", None),
            optimizer=list(trainer.optimizers),
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batch = batch
        self._steps.begin(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        micro = self._steps.micro
        if micro is None:  # once more in this batch: after a manual step, or a closure that is called repeatedly
            self._steps.begin(self._batch)
        elif pl_module.automatic_optimization:
            micro.loss = loss.detach()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        verdict = self._steps.check()
        if verdict is not None and verdict.should_stop:
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batch = None
        self._steps.end()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        # The module's own on_train_batch_start may return -1: no batch is run, and on_train_batch_end is not called.
        self._batch = None
        self._steps.discard()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        explain(exception, self._steps.end(exception))
        self._close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._batch = None
        self._steps.close()


def step(module: Any, batch: Any) -> Any:
    """The loss of a Lightning module for ``ddpstats replay --step``: what its ``training_step`` returns. Local.

    Bit for bit what Lightning differentiates, unless ``training_step`` looks at ``batch_idx`` (0 here) or the trainer
    (there is none, and ``self.log`` only warns), the loss was divided by ``accumulate_grad_batches``, or the precision
    plugin had autocast on: then write the like of this function, with that division or under ``torch.autocast``.
    """
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    output = module.training_step(batch, 0) if takes_index else module.training_step(batch)
    return output["loss"] if isinstance(output, Mapping) else output
