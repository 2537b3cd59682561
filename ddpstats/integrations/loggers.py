"""A reduction's result into TensorBoard, Weights & Biases, MLflow or Hugging Face's Trainer, through their own writers.

Imports none of them. No collective: whether one rank writes or all do is the caller's choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpstats._reduction.result import Reduced
from ddpstats.errors import ConfigError
from ddpstats.integrations._scalars import scalars_of

__all__ = ["write"]

_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")


def write(writer: Any, reduced: Reduced, step: int, *, prefix: str = "", per_rank: bool = False) -> None:
    """Log every path of ``reduced``, named as in `Reduced.flat`, at ``step``. Local.

    Args:
        writer: what the logger gives you, or None for nothing (ranks that do not log can share the line):
            ``torch.utils.tensorboard.SummaryWriter`` or tensorboardX's; ``wandb`` or a run of it; ``mlflow``, for its
            active run, with ``[0]`` in names spelled ``.0``, since it allows no brackets; ``transformers.Trainer``,
            which passes values on to its own callbacks and counts steps itself.
        reduced: what `ddpstats.reduce_stats` returned.
        prefix: put before every name, for example ``"train/"``.
        per_rank: also ``loss/min``, ``loss/max``, ``loss/min_rank`` and ``loss/max_rank`` of each path that some rank
            has a number for (not NaN). For what was reduced with ``per_rank=True``.

    Raises:
        ConfigError: the writer is none of these; ``per_rank`` of a reduction that was not, or where a path has such a
            name already, on every rank that writes or passes None; TypeError: ``reduced`` is no `Reduced`.

    Example::

        reduced = ddpstats.reduce_stats(stats, weight=batch_size)   # on every rank
        loggers.write(writer if rank == 0 else None, reduced, step)
    """
    if not isinstance(reduced, Reduced):
        raise TypeError(f"a Reduced is needed, not {type(reduced).__name__}; pass what reduce_stats() returned")
    scalars = scalars_of(reduced, prefix=prefix, per_rank=per_rank)
    if writer is None:
        return
    package = (writer.__name__ if isinstance(writer, ModuleType) else type(writer).__module__).partition(".")[0]
    is_summary_writer = callable(getattr(writer, "add_scalar", None))
    how = _WRITERS.get("tensorboard" if is_summary_writer else package) or _inherited(writer)
    if how is None:
        raise ConfigError(
            f"a writer of type {type(writer).__module__}.{type(writer).__qualname__} is not known; legal: a "
            "SummaryWriter of TensorBoard, wandb or its run, mlflow, a transformers.Trainer, None. For any other "
            "logger use reduced.flat(), a dict of floats."
        )
    how(writer, scalars, step)


def _inherited(writer: Any) -> Callable[[Any, dict[str, float], int], None] | None:
    """The way of the library that the writer's class descends from: a Trainer is often subclassed."""
    packages = [base.__module__.partition(".")[0] for base in type(writer).__mro__]
    return next((_WRITERS[package] for package in packages if package in _WRITERS), None)


def _to_tensorboard(writer: Any, scalars: dict[str, float], step: int) -> None:
    for name, value in scalars.items():
        writer.add_scalar(name, value, step)


def _to_wandb(run: Any, scalars: dict[str, float], step: int) -> None:
    run.log(scalars, step=step)


def _to_mlflow(mlflow: Any, scalars: dict[str, float], step: int) -> None:
    spelled = {name: _NOT_IN_MLFLOW.sub("_", re.sub(r"\[(\d+)\]", r".\1", name)) for name in scalars}
    clashing = sorted(name for name, other in spelled.items() if list(spelled.values()).count(other) > 1)
    if clashing:
        raise ConfigError(f"MLflow would write {clashing} under one name {spelled[clashing[0]]!r}: rename one of them")
    mlflow.log_metrics({spelled[name]: value for name, value in scalars.items()}, step=step)


def _to_trainer(trainer: Any, scalars: dict[str, float], step: int) -> None:
    trainer.log(scalars)


_WRITERS: dict[str, Callable[[Any, dict[str, float], int], None]] = {
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
    "transformers": _to_trainer,
}
