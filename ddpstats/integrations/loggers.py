"""`write_window` hands a `ddpstats.StatsWindow` to a trainer, whose own settings say in which steps it is flushed.

A logger needs nothing of this: it takes `Reduced.flat`, a dict of floats, and docs/integrations.md shows how.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

from ddpstats._reduction.window import StatsWindow
from ddpstats.errors import ConfigError

__all__ = ["write_window"]

# The package of a trainer's class -> the module of this package that attaches a window to it.
_MODULES = {"lightning": "lightning", "pytorch_lightning": "lightning", "transformers": "transformers"}


def write_window(trainer: Any, window: StatsWindow, *, prefix: str = "", per_rank: bool = False) -> None:
    """Flush ``window`` where ``trainer`` logs a step, into the row of that step. Every rank's trainer, or none.

    You add to the window where the values are, in ``training_step`` or ``compute_loss``: that sends nothing. The
    trainer's own setting says when it is flushed: ``log_every_n_steps=50`` or ``logging_steps=50`` cost one collective
    in 50 steps. Values are those of all adds since the last flush, on all ranks, and not of the last step alone.

    - Lightning: they are logged as by ``self.log``, to loggers and ``callback_metrics``. Where your module logs a name
      of the window too, Lightning shows one of the two.
    - Hugging Face's Trainer: they are in the ``logs`` that its callbacks see, and in ``state.log_history``.

    Both count optimizer steps, so micro-batches that accumulate gradients are adds of one step, and both flush what is
    left at the end of training: Lightning into its loggers and ``callback_metrics``, the Trainer into a separate row
    before its last one. Where training raises, that stays in the window. Evaluation neither flushes the window nor
    shows its values; but ``compute_loss`` runs there as well: add only ``if model.training``.

    Call it once, before training. Local.

    Args:
        trainer: of ``lightning.pytorch`` or ``pytorch_lightning``, or a ``transformers.Trainer``. It must log in the
            same steps on every rank, as the Trainer's own logging needs too. Otherwise Lightning's ranks end in
            `RankMissing`, for the flush of one waits for another that waits for its gradients.
        window: made with the ``group`` and ``nonfinite`` that you want.
        prefix: put before every name, for example ``"window/"``.
        per_rank: also what `Reduced.flat` adds with it; one collective more.

    Raises:
        ConfigError: the trainer is not one of these, or lacks what this relies on; in training, on every rank: a name
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
    packages = [base.__module__.partition(".")[0] for base in type(trainer).__mro__]  # a Trainer is often subclassed
    module = next((_MODULES[package] for package in packages if package in _MODULES), None)
    if module is None:
        raise ConfigError(f"{_description(trainer)} is not known; {_LEGAL}")
    integration = importlib.import_module(f"{__package__}.{module}")
    try:
        operator.attrgetter(*integration.WINDOW_RELIES_ON)(trainer)
    except AttributeError as error:
        raise ConfigError(f"{_description(trainer)} lacks what is relied on ({error}); {_LEGAL}") from None

    def flush() -> dict[str, float]:
        scalars = window.flush(per_rank=per_rank).flat(per_rank=per_rank)
        return {prefix + name: value for name, value in scalars.items()}

    integration.attach_window(trainer, flush)


_LEGAL = (
    "legal: a Trainer of lightning.pytorch, pytorch_lightning or transformers. In a loop of your own, where you log, "
    "give window.flush().flat() to your logger"
)


def _description(trainer: Any) -> str:
    return f"a trainer of type {type(trainer).__module__}.{type(trainer).__qualname__}"
