"""The functions that run on the ranks of `test_loggers`: Hugging Face's Trainer on a tiny model."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import ddpstats
from ddpstats.integrations import loggers
from ddpstats.testing import count_collectives
from tests.integrations.on_ranks import reset_accelerate, write
from tests.integrations.window_adds import added

transformers: Any = importlib.import_module("transformers")

Row = dict[str, float]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


class Trainer(transformers.Trainer):  # type: ignore[misc]  # a class found at run time
    """A trainer that calls a function in each batch, as trainers that add numbers do."""

    on_batch: Callable[[Any, Any], None]

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, *args, **kwargs)
        self.on_batch(self, model)
        return loss


@contextlib.contextmanager
def _quietly(folder: str) -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    reset_accelerate()
    os.environ["TENSORBOARD_LOGGING_DIR"] = folder
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
        reset_accelerate()


def trainer_of(folder: str, on_batch: Callable[[Any, Any], None], **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "ddp_backend": "gloo",
        "logging_strategy": "steps",
    }
    arguments = transformers.TrainingArguments(folder, **{**defaults, **settings})
    data = [{"x": torch.ones(1), "labels": torch.zeros(1)}] * 8
    trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data)
    trainer.on_batch = on_batch
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def reduced_in_each_step(folder: str) -> list[Row]:
    """Reduce in each step, where each rank has another key."""

    def on_batch(trainer: Any, model: Any) -> None:
        reduced = ddpstats.reduce_stats({"l1" if dist.get_rank() == 0 else "snr": 1.0 - 2 * dist.get_rank()})
        write("Hugging Face's Trainer", trainer=trainer, reduced=reduced)

    with _quietly(folder):
        trainer = trainer_of(folder, on_batch, max_steps=2, report_to="tensorboard", logging_strategy="no")
        trainer.train()
        return list(trainer.state.log_history)


def windowed(folder: str) -> tuple[list[Row], Row, int, int]:
    """34 steps of two batches, each tenth logged, and evaluation in between: the history, and what train() returns.

    Then 30 steps of one batch: the collectives that the window adds to those; how many adds are left in the end.
    """
    with _quietly(folder), ddpstats.StatsWindow(name="trainer") as window:
        batches = iter(range(200))

        def on_batch(trainer: Any, model: Any) -> None:
            stats = added(dist.get_rank(), next(batches)) if model.training else None
            if stats is not None:
                window.add(*stats)

        trainer = trainer_of(
            folder,
            on_batch,
            max_steps=34,
            gradient_accumulation_steps=2,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=15,
            report_to="tensorboard",
        )
        loggers.write_window(trainer, window)
        returned = trainer.train().metrics
        with_window, without = (_collectives(folder, on_batch, attached) for attached in (window, None))
        window.flush()  # of the run without
        return list(trainer.state.log_history), returned, with_window - without, window.adds


def _collectives(folder: str, on_batch: Any, window: ddpstats.StatsWindow | None) -> int:
    reset_accelerate()
    trainer = trainer_of(folder, on_batch, max_steps=30, logging_steps=10)
    if window is not None:
        loggers.write_window(trainer, window)
    with count_collectives() as seen:
        trainer.train()
    return seen.total


def a_name_of_the_trainer(folder: str) -> tuple[Row, str]:
    """The window has a loss, too: the row with a prefix, with what single ranks have, and the error without."""
    with _quietly(folder), ddpstats.StatsWindow(name="loss") as window:

        def on_batch(trainer: Any, model: Any) -> None:
            window.add({"loss": float(dist.get_rank())})

        trainer = trainer_of(folder, on_batch, max_steps=2, logging_steps=2)
        loggers.write_window(trainer, window, prefix="window/", per_rank=True)
        trainer.train()
        reset_accelerate()
        second = trainer_of(folder, on_batch, max_steps=2, logging_steps=2)
        loggers.write_window(second, window)
        try:
            second.train()
        except ddpstats.ConfigError as error:
            return dict(trainer.state.log_history[0]), str(error)
        return dict(trainer.state.log_history[0]), "nothing"
