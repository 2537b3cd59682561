"""Lightning's ``self.log(..., sync_dist=True)`` with right numbers, and one collective per logging point.

Stock Lightning reduces each key where it is logged, in the order in which it is logged: two to four collectives a key,
and one rank's ``even`` is averaged with another rank's ``odd``. Here ``self.log`` only remembers, and all keys of a
batch, or of an epoch, are combined by name at *points* that every rank passes:

========  =======================================  ==================================================================
step      before the ``on_*_batch_end`` hooks      what was logged with on_step in this batch
late      after them                               what these hooks logged; only where the module or a callback other
                                                   than Lightning's own has such a hook, on any rank
epoch     after the last batch, and after the      what was logged with on_epoch, over the batches of all ranks
          ``on_*_epoch_end`` hooks
========  =======================================  ==================================================================

Between its logging and the next point a key is not in ``callback_metrics`` with its new value: never this rank's own
number under the name of the mean. After a point every rank has every key, also the ones that only others logged.

A mean on_epoch is weighted by batch size, accumulated in float64; a mean on_step is the plain mean over the ranks that
logged it, as in Lightning. A NaN of one rank is NaN for all, in minima and maxima too. ``prog_bar`` and ``logger`` hold
for all ranks where one asks for them; the other settings of a key must be alike. ``sync_dist_group`` is a matter of
names here: no collective runs on that group, and what a rank outside of it logs is left out.

``rank_zero_only=True`` and ``sync_dist=False`` stay Lightning's own, and so do torchmetrics' metrics, except that all
ranks compute them in one agreed order at the epoch point, and raise where only some of them logged one. Trainers of one
device are left alone, also where a process group exists.

Training passes its points in every batch. Validation and test pass them in every batch of the first pass over a loader
(Lightning's sanity check, say), and later where any rank logged with on_step before; so validation without on_step
costs a few collectives a run. A rank that is out of batches, or never had one, answers the others' points.

``ddp_spawn`` starts processes in which nobody called `install`: use `DdpstatsCallback` there.

`DdpstatsNaNCapture`, for non-finite gradients, is a callback of its own and needs none of this.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddpstats._ranks.step import any_rank
from ddpstats.integrations._lightning_capture import DdpstatsNaNCapture as DdpstatsNaNCapture, step as step
from ddpstats.integrations._lightning_copies import COPIES, ROOTS, Callback
from ddpstats.integrations._lightning_ledger import Ledger, audience_of, combined_later, is_ours, ledger_of
from ddpstats.integrations._lightning_points import (
    answer_for_no_batches,
    epoch_point,
    evaluation_ends,
    evaluation_starts,
    late_point,
    loader_ends,
    step_point,
)
from ddpstats.integrations.patches import Patches, in_place_of

__all__ = ["DdpstatsCallback", "DdpstatsNaNCapture", "install", "step", "uninstall"]

_patches = {library: Patches(library) for library in COPIES}
_CONNECTORS = "trainer.connectors.logger_connector"
_RELIED_ON = (
    f"{_CONNECTORS}.result:_ResultCollection._get_cache(result_metric, on_step)",
    f"{_CONNECTORS}.result:_ResultCollection.log",
    f"{_CONNECTORS}.result:_ResultMetric.to",
    f"{_CONNECTORS}.result:_Sync(fn, _should, rank_zero_only, _op, _group)",
    f"{_CONNECTORS}.logger_connector:_LoggerConnector.on_batch_end(self)",
    f"{_CONNECTORS}.logger_connector:_LoggerConnector.on_epoch_end(self)",
    "trainer.call:_call_callback_hooks(trainer, hook_name, args, monitoring_callbacks, kwargs)",
    "loops.fit_loop:_FitLoop.on_advance_end(self)",
    "loops.evaluation_loop:_EvaluationLoop.run",
    "loops.evaluation_loop:_EvaluationLoop.on_run_start(self)",
    "loops.evaluation_loop:_EvaluationLoop._store_dataloader_outputs(self)",
    "loops.evaluation_loop:_EvaluationLoop.on_run_end(self)",
)
"""Below each of `ROOTS`."""
_users: set[int] = set()
"""Who wants the patches in place: 0 for `install`, a callback's id for its trainer."""


def install() -> None:
    """Patch the installed Lightning, for every trainer of this process. Local and idempotent; every rank, or none.

    Patches ``lightning.pytorch`` and ``pytorch_lightning``, whichever are installed. One that lacks what this relies
    on, whatever its version, is left unpatched, with a warning that names the difference. Does nothing under
    ``DDPSTATS_DISABLE=1``. With Trainer(callbacks=[DdpstatsCallback()]) instead, only that trainer changes.

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


class DdpstatsCallback(Callback):  # type: ignore[misc]  # a class found at run time
    """`install` for one trainer only, from its setup to its teardown: every rank's trainer, or none.

    Example: ``Trainer(callbacks=[DdpstatsCallback()])``
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if _hold(id(self)):
            _begin(trainer)


def _hold(user: int) -> bool:
    """Whether some copy of Lightning is patched now, on behalf of ``user``."""
    for library, patches in _patches.items():
        root = ROOTS[library]
        if patches.should_patch([f"{root}.{one}" for one in _RELIED_ON], partial(_probe, root)):
            _patch(patches, root)
    is_held = any(patches.is_installed for patches in _patches.values())
    if is_held:
        _users.add(user)
    return is_held


def _release(user: int) -> None:
    _users.discard(user)
    if not _users:
        for patches in _patches.values():
            patches.restore()


# -- one run of a trainer ---------------------------------------------------------------------------------------------


def _begin(trainer: Any) -> None:
    """New ledgers for the loops of this run. Every run learns anew, from what its own ranks do."""
    is_shared = (
        trainer._accelerator_connector.is_distributed
        and dist.is_available()
        and dist.is_initialized()
        and 1 < trainer.world_size == dist.get_world_size()
    )
    for results, hook in _collections(trainer):
        results.__dict__.pop("_ddpstats", None)
        if is_shared:
            _drop(results, [key for key, metric in results.items() if metric.is_tensor])
            results.__dict__["_ddpstats"] = Ledger(may_log_late=_has_users_hook(trainer, hook))


def _end(trainer: Any) -> None:
    """After the last hook, also that of an exception."""
    for results, _ in _collections(trainer):
        results.__dict__.pop("_ddpstats", None)
        _drop(results, [key for key, metric in results.items() if is_ours(metric)])
    for callback in trainer.callbacks:
        if isinstance(callback, DdpstatsCallback):
            _release(id(callback))


def _drop(results: Any, keys: list[str]) -> None:
    """Entries of an earlier run remember who combined them: Lightning, or we. Their values are with the trainer."""
    for key in keys:
        del results[key]


def _collections(trainer: Any) -> list[tuple[Any, str]]:
    """Each loop's result collection, with the hook at the end of its batches."""
    fit = trainer.fit_loop.epoch_loop
    return [
        (fit._results, "on_train_batch_end"),
        (fit.val_loop._results, "on_validation_batch_end"),
        (trainer.validate_loop._results, "on_validation_batch_end"),
        (trainer.test_loop._results, "on_test_batch_end"),
    ]


def _has_users_hook(trainer: Any, hook: str) -> bool:
    """Whether someone other than Lightning itself, or a callback of ours, might log in ``hook`` for us to combine."""
    owners = (
        getattr(getattr(one, hook, None), "__module__", None) for one in (trainer.lightning_module, *trainer.callbacks)
    )
    return any(str(owner).partition(".")[0] not in {*ROOTS, "ddpstats"} for owner in owners)


# -- in place of Lightning's ------------------------------------------------------------------------------------------


def _patch(patches: Patches, root: str) -> None:
    connectors = f"{root}.{_CONNECTORS}"
    result = importlib.import_module(f"{connectors}.result")
    connector = importlib.import_module(f"{connectors}.logger_connector")._LoggerConnector
    call = importlib.import_module(f"{root}.trainer.call")
    evaluation = importlib.import_module(f"{root}.loops.evaluation_loop")._EvaluationLoop
    fit = importlib.import_module(f"{root}.loops.fit_loop")._FitLoop
    for owner, name, ours in (
        (result._ResultMetric, "to", _to),
        (call, "_call_callback_hooks", _call_callback_hooks),
        (connector, "on_batch_end", partial(_after, late_point)),
        (connector, "on_epoch_end", partial(_after, lambda self: epoch_point(self.trainer, self.trainer._results))),
        (fit, "on_advance_end", partial(_after, lambda self: epoch_point(self.trainer, self.epoch_loop._results))),
        (evaluation, "run", _run),
        (evaluation, "on_run_start", partial(_after, evaluation_starts)),
        (evaluation, "_store_dataloader_outputs", partial(_after, loader_ends)),
        (evaluation, "on_run_end", partial(_after, evaluation_ends)),
    ):
        patches.wrap(owner, name, ours)
    collection = result._ResultCollection
    patches.replace(collection, "_get_cache", staticmethod(in_place_of(collection._get_cache, _get_cache)))
    disable: Callable[..., Any] = torch.compiler.disable
    patches.replace(collection, "log", disable(in_place_of(collection.log, _log)))


def _after(point: Callable[[Any], None], original: Callable[..., Any], self: Any) -> Any:
    """The method, after ``point``."""
    point(self)
    return original(self)


def _log(original: Callable[..., Any], self: Any, fx: str, name: str, value: Any, **settings: Any) -> None:
    ledger = ledger_of(self)
    if ledger is None:
        original(self, fx, name, value, **settings)
        return
    index = self.dataloader_idx if settings.get("add_dataloader_idx", True) else None
    key = f"{fx}.{name}" if index is None else f"{fx}.{name}.{index}"
    if getattr(self.get(key), "adopted", False):
        del self[key]  # it only held what others logged; this rank's own settings count now
    group = settings.get("sync_dist_group")
    mine = settings.get("sync_dist") and not settings.get("rank_zero_only") and isinstance(value, torch.Tensor)
    if not mine:
        original(self, fx, name, value, **settings)
    elif group is not dist.GroupMember.NON_GROUP_MEMBER:  # who is no member has no part in it
        _log_ours(original, self, ledger, key, (fx, name, value), settings)


def _log_ours(
    original: Callable[..., None], results: Any, ledger: Ledger, key: str, named: tuple[str, str, Any], settings: Any
) -> None:
    """Let Lightning accumulate, and keep what it would combine at once for the next point."""
    fx, name, value = named
    is_float64 = value.dtype == torch.float64
    if value.device.type != "mps":
        value = value.double()  # sums over an epoch are then right to float32 precision
    shown = getattr(results.get(key), "shown", {})
    original(results, fx, name, value, **{**settings, **shown, "sync_dist_fn": combined_later})
    metric = results[key]
    metric.audience, metric.is_float64 = audience_of(settings.get("sync_dist_group")), is_float64
    if metric.meta.on_step:
        ledger.pending[key], metric._forward_cache = metric._forward_cache, None
        ledger.logs_steps = True


def _to(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and not kwargs and is_ours(self) and self.value.device == args[0]:
        return self  # Lightning walks through all attributes, at every log of every key
    return original(self, *args, **kwargs)


def _get_cache(original: Callable[..., Any], result_metric: Any, on_step: bool) -> Any:
    if is_ours(result_metric) and not on_step and result_metric._computed is None:
        return None  # to compute it here would be a collective of the ranks that happen to look
    return original(result_metric, on_step)


def _call_callback_hooks(original: Callable[..., Any], trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
    if hook_name == "setup" and 0 in _users:
        _begin(trainer)
    elif hook_name in ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end"):
        step_point(trainer)
    elif hook_name == "on_train_epoch_end" and kwargs.get("monitoring_callbacks"):
        epoch_point(trainer, trainer._results)  # for what the other hooks of this name logged
    try:
        original(trainer, hook_name, *args, **kwargs)
    finally:
        if hook_name in ("teardown", "on_exception"):
            _end(trainer)


def _run(original: Callable[..., Any], self: Any) -> Any:
    outputs = original(self)
    if ledger_of(self._results) is not None and self.skip and any_rank(False):
        answer_for_no_batches(self)
    return outputs


def _probe(root: str) -> str | None:
    results = importlib.import_module(f"{root}.{_CONNECTORS}.result")._ResultCollection(True)
    results.log("training_step", "a", torch.tensor(2.0), on_step=True, on_epoch=False, batch_size=1)
    found = results.metrics(on_step=True)["callback"]
    return None if found == {"a": 2.0} else f"gives {found} for what was logged as a = 2.0"
