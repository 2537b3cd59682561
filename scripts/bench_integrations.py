"""Rows of `scripts/bench.py` on other libraries: a step that logs ten keys, as it is and with `install()`."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench_rows import Row, Variant, burst, ratios, take_turns

_KEYS = [f"key{number}" for number in range(10)]
_STEPS, _WARM = 12, 4


def integration(seconds: float, library: str) -> list[Row]:
    """Return how many times as fast a step is with the integration."""
    what = f"{library}, a step that logs 10 keys: faster than stock"
    limit = None if library == "accelerate" else 2.0  # the others issue several collectives per key
    if importlib.util.find_spec(library) is None:
        return [Row(what, [], limit, at_least=True)]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    integrated: Any = importlib.import_module(f"ddpstats.integrations.{library}")
    stock = _STEPS_OF[library]()

    def installed(number: int) -> tuple[float, float]:
        integrated.install()
        try:
            return stock(number)
        finally:
            integrated.uninstall()

    times = take_turns({"stock": stock, "installed": installed}, seconds)
    return [Row(what, ratios(times, "stock", "installed"), limit, at_least=True)]


def _steps(step: Callable[[], object]) -> Variant:
    return lambda _: burst(step, _STEPS, _WARM)


def _lightning() -> Variant:
    """Return whole training steps of a model of one weight, from one ``on_train_batch_start`` to the next."""
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
            self.log_dict({key: loss.detach() for key in _KEYS}, on_step=True, on_epoch=False, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    shown = [f"enable_{what}" for what in ("checkpointing", "progress_bar", "model_summary")]
    off = dict.fromkeys(("logger", "use_distributed_sampler", *shown), False)

    def run(_: int) -> tuple[float, float]:
        model = Model()
        plugins, devices = [LightningEnvironment()], dist.get_world_size()
        trainer = lightning.Trainer("cpu", strategy="ddp", devices=devices, plugins=plugins, max_epochs=1, **off)
        trainer.fit(model, DataLoader([torch.ones(1)] * (_STEPS + 1)))
        return model.started[_WARM], model.started[-1]

    return run


def _torchmetrics() -> Variant:
    """Return ``update`` and ``compute`` of a collection of ten means."""
    import torchmetrics

    metrics: dict[str, Any] = {key: torchmetrics.MeanMetric() for key in _KEYS}
    collection = torchmetrics.MetricCollection(metrics, compute_groups=False)

    def step() -> None:
        collection.update(1.0)
        collection.compute()

    return _steps(step)


def _torcheval() -> Variant:
    """Return ``sync_and_compute_collection`` of ten means."""
    metrics: Any = importlib.import_module("torcheval.metrics")
    toolkit: Any = importlib.import_module("torcheval.metrics.toolkit")
    means = {key: metrics.Mean() for key in _KEYS}

    def step() -> None:
        for mean in means.values():
            mean.update(torch.ones(1))
        toolkit.sync_and_compute_collection(means)

    return _steps(step)


def _accelerate() -> Variant:
    """Return ``Accelerator.reduce`` of a dict of ten losses."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    losses = {key: torch.ones(()) for key in _KEYS}
    return _steps(lambda: accelerator.reduce(losses, "mean"))


_STEPS_OF: dict[str, Callable[[], Variant]] = {
    "lightning": _lightning,
    "torchmetrics": _torchmetrics,
    "torcheval": _torcheval,
    "accelerate": _accelerate,
}
