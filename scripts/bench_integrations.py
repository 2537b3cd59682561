"""What a step that logs ten keys costs in other libraries, as they are and with `install()`.

Both take turns in one run on the same ranks, a burst of steps each; the median over a burst is compared round by round.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

KEYS = [f"key{n}" for n in range(10)]
_STEPS, _WARM = 12, 4

Samples = dict[str, list[float]]
Burst = Callable[[], list[float]]
"""Seconds of each of some steps."""


def integration_costs(library: str, rounds: int) -> Samples | None:
    """Seconds per step, "stock" and "installed", a median per round. Collective; None where it is not installed."""
    if importlib.util.find_spec(library) is None:
        return None
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    integration: Any = importlib.import_module(f"ddpstats.integrations.{library}")
    burst, order = _BURSTS[library](), random.Random(0)
    samples: Samples = {"stock": [], "installed": []}
    for number in range(rounds + 1):
        for name in order.sample(list(samples), 2):
            if name == "installed":
                integration.install()
            try:
                seconds = burst()
            finally:
                integration.uninstall()
            if number > 0:  # the first round imports, connects and negotiates
                samples[name].append(statistics.median(seconds[_WARM:]))
    return samples


def _timed(step: Callable[[], object]) -> Burst:
    def burst() -> list[float]:
        seconds = []
        for _ in range(_STEPS):
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
        return seconds

    return burst


def _lightning() -> Burst:
    """A whole training step of a model of one weight, from one ``on_train_batch_start`` to the next."""
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
    from torch.utils.data import DataLoader

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.started: list[float] = []

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.started.append(time.perf_counter())

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch).sum()
            self.log_dict({key: loss.detach() for key in KEYS}, on_step=True, on_epoch=False, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def burst() -> list[float]:
        model = Model()
        with tempfile.TemporaryDirectory() as root:
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=dist.get_world_size(),
                strategy="ddp",
                plugins=[LightningEnvironment()],
                default_root_dir=root,
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            batches: Any = [torch.ones(1)] * (_STEPS + 1)
            trainer.fit(model, DataLoader(batches))
        return [after - before for before, after in zip(model.started, model.started[1:], strict=False)]

    return burst


def _torchmetrics() -> Burst:
    """``compute`` of a collection of ten means."""
    import torchmetrics

    metrics: dict[str, Any] = {key: torchmetrics.MeanMetric() for key in KEYS}
    collection = torchmetrics.MetricCollection(metrics, compute_groups=False)

    def step() -> None:
        collection.update(1.0)
        collection.compute()

    return _timed(step)


def _torcheval() -> Burst:
    """``sync_and_compute_collection`` of ten means."""
    metrics: Any = importlib.import_module("torcheval.metrics")
    toolkit: Any = importlib.import_module("torcheval.metrics.toolkit")
    means = {key: metrics.Mean() for key in KEYS}

    def step() -> None:
        for mean in means.values():
            mean.update(torch.ones(1))
        toolkit.sync_and_compute_collection(means)

    return _timed(step)


def _accelerate() -> Burst:
    """``Accelerator.reduce`` of a dict of ten losses."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    losses = {key: torch.ones(()) for key in KEYS}
    return _timed(lambda: accelerator.reduce(losses, "mean"))


_BURSTS: dict[str, Callable[[], Burst]] = {
    "lightning": _lightning,
    "torchmetrics": _torchmetrics,
    "torcheval": _torcheval,
    "accelerate": _accelerate,
}
LIBRARIES = tuple(_BURSTS)
