"""Lightning's ``self.log(..., sync_dist=True)`` with right numbers, and one collective per logging point.

Stock Lightning reduces each key where it is logged, in the order in which it is logged: two to four collectives a key,
and one rank's ``even`` is averaged with another rank's ``odd``. Here ``self.log`` only remembers, and all keys of a
batch, or of an epoch, are combined by name at *points* that every rank passes:

========  =======================================  ==================================================================
step      before the ``on_*_batch_end`` hooks      what was logged with on_step in this batch
late      after them                               what these hooks logged with on_step, where some rank's ever did
epoch     after the last batch, and after the      what was logged with on_epoch, over the batches of all ranks
          ``on_*_epoch_end`` hooks
========  =======================================  ==================================================================

Between its logging and the next point a key is not in ``callback_metrics`` with its new value: never this rank's own
number under the name of the mean. After a point every rank has every key, also the ones that only others logged.

A mean on_epoch is weighted by batch size, accumulated in float64; a mean on_step is the plain mean over the ranks that
logged it, as in Lightning. ``sync_dist_group`` is a matter of names here: no collective runs on that group.
``rank_zero_only=True``, ``sync_dist=False`` and torchmetrics' metrics stay Lightning's own, except that all ranks
compute logged metrics in one agreed order at the epoch point, and say so where only some ranks logged one.

Training passes its step point in every batch. Validation and test pass it in every batch of their first run
(Lightning's sanity check, say), and later where any rank has logged with on_step before; so validation without on_step
costs one collective a run. A rank that is out of batches answers the others' points from its epoch point.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddpstats.errors import ConfigError
from ddpstats.integrations._lightning_points import Ledger, audience_of, combine, combined_later, is_ours
from ddpstats.integrations._patches import Patches

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise ConfigError(
        f"ddpstats.integrations.lightning needs lightning: {error}. pip install 'ddpstats[lightning]'"
    ) from error

__all__ = ["TESTED_VERSION", "DdpstatsCallback", "install", "uninstall"]

TESTED_VERSION = "2.6.6"

_patches = Patches("lightning", TESTED_VERSION)
_users: set[int] = set()
"""Who wants the patches in place: 0 for `install`, a callback's id for its trainer."""


def install() -> None:
    """Patch the installed Lightning, for every trainer of this process. Local and idempotent; every rank, or none.

    Patches ``lightning.pytorch``, and ``pytorch_lightning`` where that copy has been imported before. With another
    version than `TESTED_VERSION`, warns and leaves it unpatched. Does nothing under ``DDPSTATS_DISABLE=1``. With
    Trainer(callbacks=[DdpstatsCallback()]) instead, only that trainer changes.

    The errors of `ddpstats.StatsReducer` come from the hook after which the values are combined, on every rank alike:
    `SchemaConflict` where ranks log one key with different ``reduce_fx``, `RankMissing` where one does not come.

    Example::

        rank 0 logs {"loss": 1, "even": 0.5}   rank 1 logs {"loss": 3, "odd": 0.7}
        stock: even = odd = 0.6 under one name each; after install() every rank has loss 2, even 0.5, odd 0.7
    """
    _hold(0)


def uninstall() -> None:
    """Put Lightning's own objects back. Local and idempotent. Trainers with a `DdpstatsCallback` keep theirs."""
    _release(0)


class DdpstatsCallback(Callback):
    """`install` for one trainer only, from its setup to its teardown. Every rank's trainer, or none::

    Trainer(callbacks=[DdpstatsCallback()])
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if _hold(id(self)):
            for results in _collections(trainer):
                results.__dict__.setdefault("_ddpstats", Ledger())

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for results in _collections(trainer):
            results.__dict__.pop("_ddpstats", None)
        _release(id(self))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")


def _collections(trainer: Any) -> list[Any]:
    fit = trainer.fit_loop.epoch_loop
    return [loop._results for loop in (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop)]


def _hold(user: int) -> bool:
    """Whether Lightning is patched now, on behalf of ``user``."""
    if _patches.wanted(_signatures):
        _patch()
    if _patches.installed:
        _users.add(user)
    return _patches.installed


def _release(user: int) -> None:
    _users.discard(user)
    if not _users:
        _patches.restore()


# -- in place of Lightning's ------------------------------------------------------------------------------------------


def _patch() -> None:
    for root in _roots():
        connector = importlib.import_module(f"{root}.trainer.connectors.logger_connector.logger_connector")
        result = importlib.import_module(f"{root}.trainer.connectors.logger_connector.result")
        collection = result._ResultCollection
        _patches.replace(result._ResultMetric, "to", _to(result._ResultMetric.to))
        _patches.replace(collection, "log", _uncompiled(_log(collection.log)))
        _patches.replace(collection, "_get_cache", staticmethod(_get_cache(collection._get_cache)))
        call = importlib.import_module(f"{root}.trainer.call")
        _patches.replace(call, "_call_callback_hooks", _call_callback_hooks(call._call_callback_hooks))
        for owner, name, before in (
            (connector._LoggerConnector, "on_batch_end", _late_point),
            (
                connector._LoggerConnector,
                "on_epoch_end",
                lambda self: _epoch_point(self.trainer, self.trainer._results),
            ),
            (
                importlib.import_module(f"{root}.loops.evaluation_loop")._EvaluationLoop,
                "_store_dataloader_outputs",
                lambda self: _epoch_point(self.trainer, self._results),
            ),
            (
                importlib.import_module(f"{root}.loops.fit_loop")._FitLoop,
                "on_advance_end",
                lambda self: _epoch_point(self.trainer, self.epoch_loop._results),
            ),
        ):
            _patches.replace(owner, name, _preceded(getattr(owner, name), before))


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    disable: Callable[..., Any] = torch.compiler.disable
    return disable(function)  # type: ignore[no-any-return]


def _roots() -> list[str]:
    return [root for root in ("lightning.pytorch", "pytorch_lightning") if root in sys.modules]


def _preceded(original: Callable[..., Any], before: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any) -> Any:
        before(self)
        return original(self)

    return method


def _log(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def log(self: Any, fx: str, name: str, value: Any, **settings: Any) -> None:
        ledger = _ledger(self)
        mine = settings.get("sync_dist") and not settings.get("rank_zero_only") and isinstance(value, torch.Tensor)
        if ledger is None or not mine:
            original(self, fx, name, value, **settings)
            return
        index = self.dataloader_idx if settings.get("add_dataloader_idx", True) else None
        key = f"{fx}.{name}" if index is None else f"{fx}.{name}.{index}"
        if getattr(self.get(key), "adopted", False):
            del self[key]  # it only held what others logged; this rank's own settings count now
        if value.device.type != "mps":
            value = value.double()  # sums over an epoch are then right to float32 precision
        original(self, fx, name, value, **{**settings, "sync_dist_fn": combined_later})
        metric = self[key]
        metric.audience = audience_of(settings.get("sync_dist_group"))
        if metric.meta.on_step:
            ledger.pending[key], metric._forward_cache = metric._forward_cache, None
            ledger.logs_steps = True

    return log


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and is_ours(self) and self.value.device == args[0]:
            return self  # Lightning walks through all attributes, at every log of every key
        return original(self, *args, **kwargs)

    return to


def _get_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_cache(result_metric: Any, on_step: bool) -> Any:
        if is_ours(result_metric) and not on_step and result_metric._computed is None:
            return None  # to compute it here would be a collective of the ranks that happen to look
        return original(result_metric, on_step)

    return get_cache


def _call_callback_hooks(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def call_callback_hooks(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
        if hook_name in ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end"):
            _step_point(trainer)
        elif hook_name == "on_train_epoch_end" and kwargs.get("monitoring_callbacks"):
            _epoch_point(trainer, trainer._results)  # for what the other hooks of this name logged
        original(trainer, hook_name, *args, **kwargs)

    return call_callback_hooks


# -- points -----------------------------------------------------------------------------------------------------------


def _ledger(results: Any) -> Ledger | None:
    """The ledger of a collection; None where Lightning is to do as it does: not ours, or nobody to combine with."""
    if results is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if 0 in _users:
        return results.__dict__.setdefault("_ddpstats", Ledger())  # type: ignore[no-any-return]
    return results.__dict__.get("_ddpstats")  # type: ignore[no-any-return]


def _step_point(trainer: Any) -> None:
    ledger = _ledger(trainer._results)
    if ledger is not None and ledger.has_step_point(trainer._results):
        combine(trainer, trainer._results, ledger)


def _late_point(connector: Any) -> None:
    results = connector.trainer._results
    ledger = _ledger(results)
    if ledger is None:
        return
    if ledger.pending:
        if ledger.has_step_point(results):
            ledger.logs_late = True
        elif not ledger.any_logs_steps:
            _warn_of_withheld(ledger)
    if ledger.has_late_point(results):
        combine(connector.trainer, results, ledger)
    ledger.batches += 1


def _warn_of_withheld(ledger: Ledger) -> None:
    warnings.warn(
        f"{', '.join(sorted(ledger.pending))}: logged with on_step=True and sync_dist=True in a later run of this loop "
        "than its first, where no rank did so. The values per step are shown from the next run on (ranks look for them "
        "in the first run, and from then on where they were used); the values on_epoch are right as ever.",
        stacklevel=2,
    )


def _epoch_point(trainer: Any, results: Any) -> None:
    ledger = _ledger(results)
    if ledger is None:
        return
    while not combine(trainer, results, ledger, epoch=True):
        pass  # others still have batches, and each of their points needs all ranks
    ledger.finished.add(results.dataloader_idx)
    ledger.batches = 0


def _signatures() -> dict[Callable[..., Any], tuple[str, ...]]:
    """What the patches rely on beyond the version's number."""
    result = importlib.import_module("lightning.pytorch.trainer.connectors.logger_connector.result")
    call = importlib.import_module("lightning.pytorch.trainer.call")
    return {
        result._ResultCollection._get_cache: ("result_metric", "on_step"),
        call._call_callback_hooks: ("trainer", "hook_name", "args", "monitoring_callbacks", "kwargs"),
        result._Sync: ("fn", "_should", "rank_zero_only", "_op", "_group"),
    }
