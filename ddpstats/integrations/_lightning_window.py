"""A `StatsWindow` behind a Lightning trainer: flushed in the batches that Lightning logs, by its own rule.

The values are logged by ``self.log_dict`` of a callback's hook, so they stand in the row of that step, in
``callback_metrics`` and wherever else Lightning looks; no rank reduces them again.
"""

from __future__ import annotations

from typing import Any

import torch

from ddpstats.integrations._lightning_copies import Callback
from ddpstats.integrations.loggers import WindowScalars


def attach(trainer: Any, scalars: WindowScalars) -> None:
    # Before the others, who may read in the same hook what was logged in it.
    trainer.callbacks.insert(0, _WindowCallback(scalars))


class _WindowCallback(Callback):  # type: ignore[misc]  # a class found at run time
    def __init__(self, scalars: WindowScalars) -> None:
        super().__init__()
        self._scalars = scalars

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if _is_logged(trainer, pl_module):
            found = self._scalars.flush(_step(trainer))
            pl_module.log_dict(_tensors(found), on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        step = _step(trainer) - 1  # counted already
        rest = self._scalars.rest(step)
        if rest:  # self.log is over
            trainer._logger_connector.log_metrics(rest, step=step)
            trainer.callback_metrics.update(_tensors(rest))


def _step(trainer: Any) -> int:
    """As Lightning gives it to loggers."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _is_logged(trainer: Any, module: Any) -> bool:
    """As Lightning decides of a batch; but for ``trainer.should_stop``, which one rank may have set alone."""
    if module.automatic_optimization and trainer.fit_loop._should_accumulate():
        return False
    every = trainer.log_every_n_steps
    return bool(trainer.fast_dev_run) or bool(every and (_step(trainer) + 1) % every == 0)


def _tensors(scalars: dict[str, float]) -> dict[str, torch.Tensor]:
    """In host memory, where loggers read them, and exact."""
    return {name: torch.tensor(value, dtype=torch.float64, device="cpu") for name, value in scalars.items()}
