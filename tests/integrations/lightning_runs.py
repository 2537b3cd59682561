"""The functions that run on the ranks of `test_lightning`: trainers on a tiny model that logs what a script says.

The trainers are those of ``lightning.pytorch``, or of ``pytorch_lightning`` where `PACKAGE` in the environment says so.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import logging
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import ddpstats
from ddpstats.integrations import lightning as ours, loggers
from ddpstats.testing import count_collectives
from tests.integrations.test_contract import LIBRARIES
from tests.integrations.window_adds import added

PACKAGE = "DDPSTATS_TEST_LIGHTNING"
ROOT = os.environ.get(PACKAGE, "lightning.pytorch")
pl: Any = importlib.import_module(ROOT)
environments: Any = importlib.import_module(f"{ROOT}.plugins.environments")
EarlyStopping, ModelCheckpoint = pl.callbacks.EarlyStopping, pl.callbacks.ModelCheckpoint

Logs = Callable[[int, int], list[tuple[str, Any, dict[str, Any]]]]
"""(rank, batch index) -> what `self.log` is called with: name, value, settings."""


class Logging(pl.LightningModule):  # type: ignore[misc]  # a class found at run time
    """A module that calls `self.log` in each step as the script says."""

    def __init__(self, script: dict[str, Logs]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.script = script
        self.plateau: str | None = None
        self.seen: list[tuple[str, dict[str, float]]] = []

    def say(self, hook: str, index: int = 0) -> None:
        if hook not in self.script:
            return
        for name, value, settings in self.script[hook](dist.get_rank(), index):
            self.log(name, value, **{"sync_dist": True, "batch_size": 1, **settings})

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.say("training_step", index)
        loss: torch.Tensor = self.layer(batch).sum()
        return loss

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.say(f"validation_step{dataloader_idx or ''}", index)

    def test_step(self, batch: Any, index: int) -> None:
        self.say("test_step", index)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        if self.plateau is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.plateau}}


class Scripted(Logging):
    """A module that logs, and looks at the metrics, in the hooks at the end of a batch or an epoch, too."""

    def look(self, where: str) -> None:
        self.seen.append((where, {name: float(value) for name, value in self.trainer.callback_metrics.items()}))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.look("on_train_batch_end")
        self.say("on_train_batch_end", index)

    def on_train_epoch_end(self) -> None:
        self.look("on_train_epoch_end")
        self.say("on_train_epoch_end")

    def on_validation_batch_end(self, outputs: Any, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.look("on_validation_batch_end")
        self.say("on_validation_batch_end", index)

    def on_validation_epoch_end(self) -> None:
        self.say("on_validation_epoch_end")


class Kept(pl.loggers.Logger):  # type: ignore[misc]  # a class found at run time
    """A logger that keeps what the trainer gives to loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = "kept"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, {key: value for key, value in metrics.items() if key != "epoch"}))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """None here."""


def loader(batches: int) -> DataLoader[Any]:
    return DataLoader([torch.ones(1) for _ in range(batches)])  # type: ignore[arg-type]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without Lightning's advice: on a rank it would be an error, or noise."""
    logging.getLogger(ROOT).setLevel(logging.ERROR)
    with warnings.catch_warnings(), mock.patch("builtins.print"):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def installed(how: str) -> Iterator[list[Any]]:
    """ "stock", "install" or "callback"; yields the callbacks that this needs."""
    if how == "install":
        ours.install()
    try:
        yield [ours.DdpstatsCallback()] if how == "callback" else []
    finally:
        ours.uninstall()


def trainer_of(root: str, callbacks: list[Any], **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "strategy": "ddp",
        "plugins": [environments.LightningEnvironment()],
        "default_root_dir": root,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "logger": Kept(),
        "use_distributed_sampler": False,
        "callbacks": callbacks,
    }
    return pl.Trainer(**{**defaults, **settings})


Found = dict[str, Any]
"""What one rank's run left: "seen" in hooks, "callback" metrics, "rows" for loggers, "weight" of the model, ..."""


def fit(
    script: dict[str, Logs],
    how: str,
    *,
    train: int = 2,
    val: int | list[int] = 0,
    callbacks: list[Any] | None = None,
    plateau: str | None = None,
    kind: type[Logging] = Scripted,
    **settings: Any,
) -> Found:
    """``Trainer.fit`` on this rank; ``val`` batches on this rank, per dataloader where it is a list."""
    torch.manual_seed(0)
    with quietly(), installed(how) as extra, tempfile.TemporaryDirectory() as root:
        model = kind(script)
        model.plateau = plateau
        trainer = trainer_of(root, [*extra, *(callbacks or [])], **settings)
        loaders = None if val == 0 else loader(val) if isinstance(val, int) else [loader(n) for n in val]
        trainer.fit(model, loader(train), loaders)
        return {
            "seen": model.seen,
            "callback": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "dtypes": {name: str(value.dtype) for name, value in trainer.callback_metrics.items()},
            "rows": trainer.logger.rows,
            "weight": model.layer.weight.item(),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "epoch": trainer.current_epoch,
        }


STEP = {"on_step": True, "on_epoch": False}
BOTH = {"on_step": True, "on_epoch": True}
EPOCH = {"on_step": False, "on_epoch": True}


LOW = torch.tensor(0.1, dtype=torch.bfloat16)
EXACT = torch.tensor(16777217.0, dtype=torch.float64)
"""A number that float32 cannot hold."""

SCRIPTS: dict[str, dict[str, Logs]] = {
    "different keys": {
        "training_step": lambda rank, i: [
            ("loss", 1.0 + 2 * rank, BOTH),
            (("even", "odd")[rank], (0.5, 0.75)[rank], STEP),
        ],
        "validation_step": lambda rank, i: [("v", 1.0 + rank, EPOCH), (f"v{rank}", float(rank), EPOCH)],
    },
    "other order": {
        "training_step": lambda rank, i: [("a", 1.0, BOTH), ("b", 100.0, BOTH)][:: 1 - 2 * rank],
        "validation_step": lambda rank, i: [("c", 1.0, EPOCH), ("d", 100.0, EPOCH)][:: 1 - 2 * rank],
    },
    "now and then": {
        "training_step": lambda rank, i: [("x", float(i), BOTH)] if i % 2 == rank else [],
        "validation_step": lambda rank, i: [("y", float(i), BOTH)] if i % 2 == rank else [],
    },
    "batch sizes": {
        "training_step": lambda rank, i: [("one", 1.0, {**BOTH, "batch_size": 1 + rank})],
        "validation_step": lambda rank, i: [
            ("one", 1.0, {"batch_size": 1 + rank}),
            ("mean", 2.0 * rank + i, {"batch_size": 1 + 2 * rank}),
        ],
    },
    "reductions": {
        "training_step": lambda rank, i: [
            (op, 1.0 + rank + 10 * i, {**BOTH, "reduce_fx": op}) for op in ("sum", "min", "max", "mean")
        ],
        "validation_step": lambda rank, i: [
            (f"{op}{rank}", 1.0 + rank + 10 * i, {"reduce_fx": op}) for op in ("sum", "min", "max", "mean")
        ],
    },
    "low precision": {
        "training_step": lambda rank, i: [("low", LOW, BOTH), ("exact", EXACT, EPOCH)],
        "validation_step": lambda rank, i: [("low", LOW, {}), ("whole", 3 + rank, {})],
    },
    "late": {
        "training_step": lambda rank, i: [("loss", 1.0, STEP)],
        "on_train_batch_end": lambda rank, i: [(f"late{rank}", float(i), BOTH)],
        "on_train_epoch_end": lambda rank, i: [(f"end{rank}", 5.0 + rank, {}), ("end", float(rank), {})],
        "on_validation_epoch_end": lambda rank, i: [(f"vend{rank}", 7.0 + rank, {}), ("vend", float(rank), {})],
    },
    "rank zero only": {
        "training_step": lambda rank, i: [("mine", float(rank), {**STEP, "rank_zero_only": True})] if rank == 0 else []
    },
    "not synced": {
        "training_step": lambda rank, i: [("own", float(rank), {**BOTH, "sync_dist": False})],
        "validation_step": lambda rank, i: [("own", float(rank), {"sync_dist": False})],
    },
    "loaders": {
        "validation_step": lambda rank, i: [(f"only{rank}", 1.0 + i, {}), ("all", float(rank), {})],
        "validation_step1": lambda rank, i: [(f"only{rank}", 11.0 + i, {}), ("all", float(rank), {})],
    },
    "one name in two hooks": {
        "validation_step": lambda rank, i: [("v", 1.0 + i, EPOCH)],
        "on_validation_batch_end": lambda rank, i: [("v", 100.0 + i, EPOCH)],
    },
    "two reductions": {"training_step": lambda rank, i: [("loss", 1.0, {**STEP, "reduce_fx": ("sum", "max")[rank]})]},
    "two reductions of an epoch": {
        "validation_step": lambda rank, i: [("loss", 1.0, {"reduce_fx": ("mean", "sum")[rank]})]
    },
    "of a group": {
        "training_step": lambda rank, i: [("k", float(rank), {**STEP, "sync_dist_group": dist.group.WORLD})]
    },
    "progress bar on one rank": {
        "training_step": lambda rank, i: [
            ("k", 1.0 + rank, ({**STEP, "logger": False}, {**STEP, "prog_bar": True})[rank])
        ]
    },
    "uneven": {"validation_step": lambda rank, i: [("y", float(i), BOTH)]},
    "watched": {"validation_step": lambda rank, i: [("watched", 1.0, EPOCH)] if rank == 1 else []},
    "ten keys": {
        "training_step": lambda rank, i: [(f"k{n}", float(rank), STEP) for n in range(10)],
        "validation_step": lambda rank, i: [(f"k{n}", float(rank), {}) for n in range(10)],
    },
    "nothing": {"training_step": lambda rank, i: []},
}


def play(name: str, how: str, **settings: Any) -> Found:
    """One of the `SCRIPTS` by ``Trainer.fit``."""
    return fit(SCRIPTS[name], how, **settings)


def play_watched(how: str, kind: str) -> tuple[Found, Any]:
    """Rank 1 alone logs the key that decides: "stop", "checkpoint" or "plateau"."""
    with tempfile.TemporaryDirectory() as root:
        callbacks: dict[str, list[Any]] = {
            "stop": [EarlyStopping("watched", patience=1)],
            "checkpoint": [ModelCheckpoint(root, monitor="watched", filename="{watched:.1f}")],
            "plateau": [],
        }
        run = fit(
            SCRIPTS["watched"],
            how,
            val=2,
            callbacks=callbacks[kind],
            plateau="watched" if kind == "plateau" else None,
            max_epochs=5,
        )
        return run, sorted(path.name for path in pathlib.Path(root).iterdir())


def play_stages(how: str) -> list[Any]:
    """validate, test, and what they return."""
    script = dict.fromkeys(
        ("validation_step", "validation_step1", "test_step"), SCRIPTS["different keys"]["validation_step"]
    )
    with quietly(), installed(how) as extra, tempfile.TemporaryDirectory() as root:
        trainer = trainer_of(root, extra)
        model = Scripted(script)
        stages = [(trainer.validate, loader(2)), (trainer.test, loader(2)), (trainer.validate, [loader(2), loader(1)])]
        return [run(model, loaders, verbose=False) for run, loaders in stages]


def raised(name: str, *args: Any, **settings: Any) -> tuple[str, str, tuple[int, ...]]:
    """The class, text and ranks of what a run raised."""
    try:
        globals()[name](*args, **settings)
    except ddpstats.DdpstatsError as error:
        return type(error).__name__, str(error), error.ranks
    return "nothing", "", ()


def counted() -> list[dict[str, int]]:
    """Collectives for each batch more, as ten keys are logged; by a model without a hook at its end, and with one."""
    return [
        {how: (_logged(how, 13, kind) - _logged(how, 3, kind)) // 10 for how in ("stock", "install", "callback")}
        for kind in (Logging, Scripted)
    ]


def _logged(how: str, train: int, kind: type[Logging]) -> int:
    """Collectives that training on ``train`` batches issues because ten keys are logged, once ranks know them."""
    play("ten keys", how, train=1, kind=kind)
    totals = []
    for name in ("ten keys", "nothing"):
        with count_collectives() as seen:
            play(name, how if name == "ten keys" else "stock", train=train, kind=kind)
        totals.append(seen.total)
    return totals[0] - totals[1]


def of_ten_more_validation_batches(how: str) -> list[int]:
    """Collectives that they cost: logged on_epoch, and on_step as well."""
    differences = []
    for settings in (EPOCH, BOTH):

        def logs(rank: int, i: int, settings: dict[str, Any] = settings) -> list[tuple[str, Any, dict[str, Any]]]:
            return [("v", float(i), settings)]

        script: dict[str, Logs] = {"validation_step": logs}
        fit(script, how, train=1, val=2)  # ranks connect, and agree on the keys
        totals = []
        for val in (2, 12):
            with count_collectives() as seen:
                fit(script, how, train=1, val=val)
            totals.append(seen.total)
        differences.append(totals[1] - totals[0])
    return differences


class Adding(Logging):
    """A module that adds its batches' stats to a window, without a hook at the end of a batch."""

    def __init__(self, window: ddpstats.StatsWindow) -> None:
        super().__init__({"validation_step": lambda rank, i: [("v", 1.0, EPOCH)]})
        self.window, self.batches = window, iter(range(200))

    def training_step(self, batch: Any, index: int) -> Any:
        stats = added(dist.get_rank(), next(self.batches))
        if stats is not None:
            self.window.add(*stats)
        return super().training_step(batch, index)


class AddingAndLooking(Adding, Scripted):
    """Also looks at what it finds at the end of each batch."""


def windowed(how: str) -> Found:
    """34 steps of two batches, in two epochs, each tenth logged, and validation after each epoch.

    Then 30 steps of one batch: "collectives" that the window adds to those; how many adds are "left".
    """
    with ddpstats.StatsWindow(name="trainer") as window:
        with quietly(), installed(how) as extra, tempfile.TemporaryDirectory() as root:
            model = AddingAndLooking(window)
            settings = {"log_every_n_steps": 10, "accumulate_grad_batches": 2, "max_epochs": 2}
            trainer = trainer_of(root, extra, **settings)
            loggers.write_window(trainer, window)
            trainer.fit(model, loader(34), loader(1))
            end = {name: float(value) for name, value in trainer.callback_metrics.items()}
            rows = trainer.logger.rows
        with_window, without = (_trained(how, window, attached) for attached in (True, False))
        window.flush()  # of the run without
        return {
            "rows": rows, "seen": model.seen, "end": end, "collectives": with_window - without, "left": window.adds,
        }  # fmt: skip


def _trained(how: str, window: ddpstats.StatsWindow, attached: bool) -> int:
    """Collectives of 30 steps."""
    with quietly(), installed(how) as extra, tempfile.TemporaryDirectory() as root:
        trainer = trainer_of(root, extra, log_every_n_steps=10)
        if attached:
            loggers.write_window(trainer, window)
        with count_collectives() as seen:
            trainer.fit(Adding(window), loader(30))
        return seen.total


def windows_at_other_steps(folder: pathlib.Path) -> None:
    """Rank 0 logs each second step and rank 1 each third. A rank that misses the other says so and ends as a script."""
    with quietly(), ddpstats.StatsWindow(name="trainer") as window, tempfile.TemporaryDirectory() as root:
        trainer = trainer_of(root, [], log_every_n_steps=2 + dist.get_rank())
        loggers.write_window(trainer, window)
        try:
            trainer.fit(Adding(window), loader(6))
        except ddpstats.RankMissing as error:
            (folder / f"rank{dist.get_rank()}").write_text(f"misses {error.missing_ranks}")
            os._exit(1)


class Peeking(Logging):
    """Looks for the key right after it was logged."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.seen.append(("training_step", {name: float(v) for name, v in self.trainer.callback_metrics.items()}))
        return loss


def peeked(how: str) -> list[dict[str, float]]:
    """Return callback_metrics between logging and the next point, in each step; ranks log different numbers."""
    script: dict[str, Logs] = {"training_step": lambda rank, i: [("k", 10.0 * i + rank, STEP)]}
    return [metrics for _, metrics in fit(script, how, train=3, kind=Peeking)["seen"]]


class Late(Logging):
    """Rank 1 comes to the point of its first batch when rank 0 has given up, though it took part in DDP's reduction."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if dist.get_rank() == 1:
            dist.distributed_c10d._get_default_store().wait(["rank 0 has raised"], datetime.timedelta(seconds=60))


def one_is_late(how: str) -> tuple[str, str, tuple[int, ...]]:
    error = raised("fit", {"training_step": lambda rank, i: [("k", float(rank), STEP)]}, how, train=2, kind=Late)
    dist.distributed_c10d._get_default_store().set(f"rank {dist.get_rank()} has raised", "")
    return error


def play_uneven(how: str, sanity: int) -> Found:
    """Rank 0 validates five batches and rank 1 two, twice."""
    return play("uneven", how, val=5 - 3 * dist.get_rank(), max_epochs=2, num_sanity_val_steps=sanity)


def validate_without_sizes(how: str) -> dict[str, float]:
    """The size of a batch of plain objects is not known, and not needed."""
    script: dict[str, Logs] = {"validation_step": lambda rank, i: [("v", 1.0 + rank, {**STEP, "batch_size": None})]}
    batches: Any = DataLoader([object(), object()], collate_fn=list)  # type: ignore[arg-type]
    with quietly(), installed(how) as extra, tempfile.TemporaryDirectory() as root:
        trainer = trainer_of(root, extra)
        trainer.validate(Logging(script), batches)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}


def skips_seen_by_one_rank(how: str) -> list[bool]:
    """Rank 0 alone looks at whether its loops are skipped, in a run and after it."""
    seen: list[bool] = []

    class Looks(Logging):
        def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
            if dist.get_rank() == 0:
                seen.append(self.trainer.validate_loop.skip)

    with quietly(), installed(how) as extra, tempfile.TemporaryDirectory() as root:
        trainer = trainer_of(root, extra)
        trainer.validate(Looks({}), loader(2))
        return seen + [trainer.validate_loop.skip] * (1 - dist.get_rank())


def play_agreeing(name: str, how: str) -> Found:
    """A script as rank 0 would play it, on all ranks, with values of their own."""
    script = {hook: _for_all(logs) for hook, logs in SCRIPTS[name].items()}
    return fit(script, how, train=3, val=[2, 3] if name == "loaders" else 2, max_epochs=2, num_sanity_val_steps=1)


def _for_all(logs: Logs) -> Logs:
    def same_keys(rank: int, index: int) -> list[tuple[str, Any, dict[str, Any]]]:
        return [(key, value + rank, settings) for key, value, settings in logs(0, index)]

    return same_keys


def close(left: Any, right: Any) -> bool:
    """Equal, numbers to float32 precision."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(close(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(close, left, right))
    if isinstance(left, float):
        return bool(abs(left - right) <= 1e-6 * max(abs(left), abs(right)))
    return bool(left == right)


def left_by_callback() -> tuple[bool, bool]:
    """Return whether Lightning is as before after a run with the callback, and after one that raised."""
    (library,) = (library for library in LIBRARIES if library.package == ROOT.partition(".")[0])
    before = library.objects()
    play("different keys", "callback")
    clean = all(value is before[name] for name, value in library.objects().items())
    raised("play", "two reductions", "callback")
    return clean, all(value is before[name] for name, value in library.objects().items())


# -- programs that differ between ranks, or are unusual --------------------------------------------------------------


def trainers_of_one_rank() -> Any:
    """Rank 0 alone tests with a trainer of one device, in the middle of a distributed job."""
    if dist.get_rank() == 1:
        return None
    with quietly(), installed("install"), tempfile.TemporaryDirectory() as root:
        trainer = trainer_of(root, [], devices=1, strategy="auto", plugins=None)
        script: dict[str, Logs] = {
            "test_step": lambda rank, i: [("t", 0.5, {})],
            "validation_step": lambda rank, i: [("v", 1.0, {})],
            "validation_step1": lambda rank, i: [("v", 2.0, {})],
        }
        model = Scripted(script)
        several = trainer.validate(model, [loader(1), loader(2)], verbose=False)
        return [*trainer.test(model, loader(2), verbose=False), *several]


def without_batches(how: str, several: bool) -> tuple[dict[str, float], int]:
    """Rank 1 has no batch to validate: of any loader, or of the second one."""
    rank = dist.get_rank()

    class Model(Scripted):
        def __init__(self, script: dict[str, Logs]) -> None:
            super().__init__(script)
            self.allow_zero_length_dataloader_with_multiple_devices = True

    script: dict[str, Logs] = {
        "validation_step": lambda rank, i: [("v", 1.0 + rank, {})],
        "validation_step1": lambda rank, i: [("v", 5.0, {})],
    }
    val: Any = [2, 2 - 2 * rank] if several else 2 - 2 * rank
    stop = EarlyStopping("v/dataloader_idx_0" if several else "v", patience=1)
    run = fit(script, how, val=val if several else [val], kind=Model, callbacks=[stop], max_epochs=5)
    return dict(run["callback"]), run["epoch"]


def one_trainer_twice(first: str, second: str) -> list[dict[str, float]]:
    """The same trainer fits twice, each time installed in another way."""
    metrics: list[dict[str, float]] = []
    with quietly(), tempfile.TemporaryDirectory() as root:
        model, trainer = Scripted({"training_step": lambda rank, i: [("loss", 1.0 + rank, BOTH)]}), trainer_of(root, [])
        for how in (first, second):
            with installed(how):
                trainer.fit(model, loader(2))
            metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
            trainer.fit_loop.epoch_progress.reset()
    return metrics
