"""Results into TensorBoard, Weights & Biases, MLflow, accelerate, Hugging Face's Trainer, Lightning, by their own ways.

`write` takes the result of a reduction. No collective: whether one rank writes or all do is the caller's choice.
`write_window` hands a `ddpstats.StatsWindow` to a trainer, which says by its own settings in which steps it is flushed.

Imports none of them.
"""

from __future__ import annotations

import functools
import importlib
import operator
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from ddpstats._reduction.result import Reduced
from ddpstats._reduction.window import StatsWindow
from ddpstats.errors import ConfigError

__all__ = ["write", "write_window"]

_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")
_Way = TypeVar("_Way")


def write(writer: Any, reduced: Reduced, step: int, *, prefix: str = "", per_rank: bool = False) -> None:
    """Log every path of ``reduced``, named as in `Reduced.flat`, at ``step``. Local.

    Args:
        writer: what the logger gives you, or None for nothing (ranks that do not log can share the line):
            ``torch.utils.tensorboard.SummaryWriter`` or tensorboardX's; ``wandb`` or a run of it; ``mlflow``, for its
            active run, with ``[0]`` in names spelled ``.0``, since it allows no brackets; ``accelerate.Accelerator``,
            for its trackers, on every rank as its own ``log``; ``transformers.Trainer``, which passes values on to its
            own callbacks and counts steps itself.
        reduced: what `ddpstats.reduce_stats` or `ddpstats.StatsWindow.flush` returned.
        prefix: put before every name, for example ``"train/"``.
        per_rank: also ``loss/min``, ``loss/max``, ``loss/min_rank`` and ``loss/max_rank`` of each path that some rank
            has a number for (not NaN). For what was reduced with ``per_rank=True``.

    Raises:
        ConfigError: the writer is none of these; ``per_rank`` of a reduction that was not, or where a path has such a
            name already, on every rank that writes or passes None; TypeError: ``reduced`` is no `Reduced`.

    Example::

        reduced = ddpstats.reduce_stats(stats, weight=batch_size)   # on every rank
        loggers.write(writer if rank == 0 else None, reduced, step)

        # with accelerate, each 50 steps; the same once more after the loop, for the steps that are left
        loggers.write(accelerator, window.flush(), step)
    """
    if not isinstance(reduced, Reduced):
        raise TypeError(f"a Reduced is needed, not {type(reduced).__name__}; pass what reduce_stats() returned")
    scalars = _scalars_of(reduced, prefix=prefix, per_rank=per_rank)
    if writer is None:
        return
    is_summary_writer = callable(getattr(writer, "add_scalar", None))
    how = _WRITERS["tensorboard"] if is_summary_writer else _of_library(writer, _WRITERS)
    if how is None:
        raise ConfigError(
            f"a writer of type {type(writer).__module__}.{type(writer).__qualname__} is not known; legal: a "
            "SummaryWriter of TensorBoard, wandb or its run, mlflow, an accelerate.Accelerator, a "
            "transformers.Trainer, None. For any other logger use reduced.flat(), a dict of floats."
        )
    how(writer, scalars, step)


def write_window(trainer: Any, window: StatsWindow, *, prefix: str = "", per_rank: bool = False) -> None:
    """Flush ``window`` where ``trainer`` logs a step, into its own row of that step. Every rank's trainer, or none.

    You add to the window where the values are, in ``training_step`` or ``compute_loss``: that sends nothing. The
    trainer's own setting says when it is flushed: ``log_every_n_steps=50`` or ``logging_steps=50`` cost one collective
    in 50 steps. Values are those of all adds since the last flush, on all ranks, and not of the last step alone.

    - Lightning: they are logged as by ``self.log``, to loggers and ``callback_metrics``. Where your module logs a name
      of the window too, Lightning shows one of the two.
    - Hugging Face's Trainer: they are in the ``logs`` that its callbacks see, and in ``state.log_history``.

    Both count optimizer steps, so micro-batches that accumulate gradients are adds of one step, and both flush what is
    left at the end of training: Lightning into its loggers and ``callback_metrics``, the Trainer into a row of its own
    before its last one. Where training raises, that stays in the window. Evaluation neither flushes the window nor
    shows its values; but ``compute_loss`` runs there as well: add only ``if model.training``.

    Call it once, before training. Local.

    Args:
        trainer: of ``lightning.pytorch`` or ``pytorch_lightning``, or a ``transformers.Trainer``. It must log in the
            same steps on every rank, as the Trainer's own logging needs too. Lightning's ranks else end in
            `RankMissing`, for the flush of one waits for another that waits for its gradients.
        window: made with the ``group`` and ``nonfinite`` that you want.
        prefix: put before every name, for example ``"window/"``.
        per_rank: also what `write` adds with it; one collective more.

    Raises:
        ConfigError: the trainer is none of these, or has not what this relies on; in training, on every rank: a name
            of the Trainer's own row (``loss``, ``grad_norm``, ``learning_rate``, ``epoch``, ``step``) without a
            ``prefix``. TypeError: ``window`` is no `StatsWindow`. In training also what `StatsWindow.flush` raises.

    Example::

        window = ddpstats.StatsWindow(name="train")
        # in training_step or compute_loss:  window.add({"accuracy": accuracy}, weight=len(batch))
        loggers.write_window(trainer, window)
        trainer.fit(module, loader)     # or trainer.train()
    """
    if not isinstance(window, StatsWindow):
        raise TypeError(f"a StatsWindow is needed, not {type(window).__name__}")
    kind = _of_library(trainer, _TRAINERS)
    missing = [] if kind is None else [name for name in kind.relied_on if not _has(trainer, name)]
    if kind is None or missing:
        why = f"has no {', '.join(missing)}" if missing else "is not known"
        raise ConfigError(
            f"a trainer of type {type(trainer).__module__}.{type(trainer).__qualname__} {why}; legal: a Trainer of "
            "lightning.pytorch, pytorch_lightning or transformers. In a loop of your own, where you log: "
            "write(writer, window.flush(), step)"
        )
    kind.attach(trainer, WindowScalars(window, prefix=prefix, per_rank=per_rank))


def _of_library(one: Any, ways: dict[str, _Way]) -> _Way | None:
    """What is known of the library that ``one`` is, or whose class it descends from: a Trainer is often subclassed."""
    modules = [one.__name__] if isinstance(one, ModuleType) else [base.__module__ for base in type(one).__mro__]
    packages = [module.partition(".")[0] for module in modules]
    return next((ways[package] for package in packages if package in ways), None)


# -- what loggers get of a reduction, a number for each name; and of a window, whenever a trainer logs -----------------


def _scalars_of(reduced: Reduced, *, prefix: str, per_rank: bool) -> dict[str, float]:
    """Every path under its name; with ``per_rank`` also its minimum, its maximum and their ranks."""
    scalars = {**reduced.flat(), **_extremes(reduced)} if per_rank else reduced.flat()
    return {prefix + name: value for name, value in scalars.items()}


class WindowScalars:
    """A window's scalars by the step of a trainer, which every rank's trainer counts alike."""

    def __init__(self, window: StatsWindow, *, prefix: str, per_rank: bool) -> None:
        self._window, self._prefix, self._per_rank = window, prefix, per_rank
        self._flushed_at: int | None = None

    def flush(self, step: int) -> dict[str, float]:
        """What was added since the last flush. Collective."""
        self._flushed_at = step
        reduced = self._window.flush(per_rank=self._per_rank)
        return _scalars_of(reduced, prefix=self._prefix, per_rank=self._per_rank)

    def rest(self, step: int) -> dict[str, float]:
        """What training left behind at its last ``step``: nothing where that was flushed. Collective else."""
        found = {} if step == self._flushed_at else self.flush(step)
        self._flushed_at = None  # the trainer may train again, and count from 0
        return found


def _extremes(reduced: Reduced) -> dict[str, float]:
    if reduced.by_rank is None:
        raise ConfigError("nothing is known of single ranks: reduce with per_rank=True, as reduce_stats() takes it")
    found: dict[str, float] = {}
    for name, held in reduced.flat_by_rank().items():
        for which, rank in (("min", held.min_rank), ("max", held.max_rank)):
            value = None if rank is None else held.values[held.ranks.index(rank)]
            if rank is not None and value is not None:
                found |= {f"{name}/{which}": float(value), f"{name}/{which}_rank": float(rank)}
    taken = sorted(found.keys() & reduced.flat().keys())
    if taken:
        raise ConfigError(f"per_rank=True would write {taken[0]!r} twice, since a path has that name: rename it")
    return found


# -- the ways of each library ------------------------------------------------------------------------------------------


def _to_tensorboard(writer: Any, scalars: dict[str, float], step: int) -> None:
    for name, value in scalars.items():
        writer.add_scalar(name, value, step)


def _to_mlflow(mlflow: Any, scalars: dict[str, float], step: int) -> None:
    spelled = {name: _NOT_IN_MLFLOW.sub("_", re.sub(r"\[(\d+)\]", r".\1", name)) for name in scalars}
    clashing = sorted(name for name, other in spelled.items() if list(spelled.values()).count(other) > 1)
    if clashing:
        raise ConfigError(f"MLflow would write {clashing} under one name {spelled[clashing[0]]!r}: rename one of them")
    mlflow.log_metrics({spelled[name]: value for name, value in scalars.items()}, step=step)


_WRITERS: dict[str, Callable[[Any, dict[str, float], int], None]] = {
    "tensorboard": _to_tensorboard,
    "wandb": lambda run, scalars, step: run.log(scalars, step=step),
    "mlflow": _to_mlflow,
    "accelerate": lambda accelerator, scalars, step: accelerator.log(scalars, step=step),
    "transformers": lambda trainer, scalars, step: trainer.log(scalars),
}


def _attach_to_lightning(trainer: Any, scalars: WindowScalars) -> None:
    importlib.import_module(f"{__package__}._lightning_window").attach(trainer, scalars)


def _attach_to_transformers(trainer: Any, scalars: WindowScalars) -> None:
    """A callback would come too late: those of ``report_to`` are called before a user's, and the history is written."""
    log = trainer.log

    @functools.wraps(log)
    def log_with_window(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        step = trainer.state.global_step
        if "total_flos" in logs:  # the last row of training, whose metrics train() returns
            rest = scalars.rest(step)
            if rest:
                log(_joined({}, rest), *args, **kwargs)
        elif "loss" in logs and trainer.control.should_log:  # neither evaluation nor what a user logs
            logs = _joined(logs, scalars.flush(step))
        log(logs, *args, **kwargs)

    trainer.log = log_with_window


def _joined(logs: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    taken = sorted(found.keys() & {*logs, "epoch", "step"})
    if taken:
        raise ConfigError(
            f"the Trainer logs {taken[0]!r} itself, and so would the window: give write_window a prefix, such as "
            "prefix='window/', or rename it in window.add"
        )
    return {**logs, **found}


def _has(trainer: Any, name: str) -> bool:
    try:
        operator.attrgetter(name)(trainer)
    except AttributeError:
        return False
    return True


class _Trainers(NamedTuple):
    attach: Callable[[Any, WindowScalars], None]
    relied_on: tuple[str, ...]


_LIGHTNING = _Trainers(
    _attach_to_lightning,
    (
        "callbacks",
        "callback_metrics",
        "fast_dev_run",
        "log_every_n_steps",
        "fit_loop._should_accumulate",
        "fit_loop.epoch_loop._batches_that_stepped",
        "_logger_connector.log_metrics",
    ),
)
_TRAINERS: dict[str, _Trainers] = {
    "lightning": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "transformers": _Trainers(_attach_to_transformers, ("log", "control.should_log", "state.global_step")),
}
