"""Lightning's ``self.log(..., sync_dist=True)`` with right numbers, and one collective for all keys of a batch.

Stock Lightning reduces each key where it is logged, in the order in which it is logged: two to four collectives a key,
and one rank's ``even`` is averaged with another rank's ``odd``. Here ``self.log`` only remembers such a key, and all
ranks combine what they remember, by name, around hooks that every rank passes: before the callbacks' hook, and again
after the module's, for what was logged in these hooks.

===========================  ==========================================================================================
on_train_batch_end           what was logged with on_step in this batch: one collective, and a second one only where the
                             module or a callback other than Lightning's own has this hook, on any rank
on_train_epoch_end,          what was logged with on_epoch, over the batches of all ranks; before EarlyStopping,
on_validation_epoch_end,     ModelCheckpoint and schedulers read it
on_test_epoch_end
===========================  ==========================================================================================

Combined values are logged by Lightning's own means, on every rank. Until then a key is not in ``callback_metrics`` with
its new value: never this rank's own number under the name of the mean.

A mean on_epoch is weighted by batch size, accumulated in float64; a mean on_step is the plain mean over the ranks that
logged it, as in Lightning. ``prog_bar`` and ``logger`` hold for all ranks where one asks for them. In validation and
test the ranks' batches need not match, so on_step means on_epoch there: such a key has no value per step.

A rank without a batch to validate, or to test, passes all hooks of that loop where another rank has one.

Lightning's own stay: trainers of one device, ``rank_zero_only=True``, ``sync_dist=False``, ``sync_dist_group``, and
torchmetrics' metrics.

Five objects are patched, and each is needed: ``log`` to remember a key; the call of the callbacks' hooks, because
callbacks that the user gives may read the values in them, and run before any that ddpstats could register; that
of the module's hook, because no public hook lies between it and EarlyStopping, checkpoints and loggers, which read what
it logs; an evaluation loop's ``skip``, for a rank without a batch; and its ``run``, because a program may read ``skip``
on one rank alone, which must not wait for the others.

``ddp_spawn`` starts processes without `install`: use `DdpstatsCallback` there.

`DdpstatsNaNCapture`, for non-finite gradients, is a separate callback and needs none of this.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ddpstats._ranks.step import any_rank
from ddpstats._reduction import ops as markers
from ddpstats._reduction.reducer import reduce_stats
from ddpstats._reduction.window import StatsWindow
from ddpstats.errors import ConfigError
from ddpstats.integrations.capture_steps import TrainerCapture, explain
from ddpstats.integrations.patches import Patches, in_place_of

__all__ = ["DdpstatsCallback", "DdpstatsNaNCapture", "install", "step", "uninstall"]

# The distributions that have Lightning's modules, and the package above these. Installing the first brings the second,
# and a program may use either.
ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def _import_copies() -> dict[str, ModuleType]:
    """Import all copies that can be imported. Raises `ConfigError` where none can."""
    copies: dict[str, ModuleType] = {}
    errors: list[str] = []
    for library, root in ROOTS.items():
        try:
            copies[library] = importlib.import_module(root)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    if not copies:
        raise ConfigError(
            f"ddpstats.integrations.lightning needs lightning or pytorch_lightning: {'; '.join(errors)}. "
            "pip install 'ddpstats[lightning]'"
        )
    return copies


_COPIES = _import_copies()
# A callback to the trainers of every copy.
Callback: Any = type("Callback", tuple(copy.Callback for copy in _COPIES.values()), {})
_patches = {library: Patches(library) for library in _COPIES}
# The users of the patches: 0 for `install`, a callback's id for its trainer.
_users: set[int] = set()

_RESULT = "trainer.connectors.logger_connector.result"
# Below each of `ROOTS`.
_RELIED_ON = (
    f"{_RESULT}:_ResultCollection.log",
    f"{_RESULT}:_ResultCollection.update_metrics(self, key, value, batch_size)",
    f"{_RESULT}:_ResultCollection.metrics(self, on_step)",
    "trainer.connectors.logger_connector.logger_connector:_LoggerConnector.update_eval_epoch_metrics(self)",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector.is_distributed",
    "trainer.trainer:Trainer._evaluation_loop",
    "trainer.trainer:Trainer._results",
    "trainer.call:_call_callback_hooks(trainer, hook_name, args, monitoring_callbacks, kwargs)",
    "trainer.call:_call_lightning_module_hook(trainer, hook_name, args, pl_module, kwargs)",
    "loops.evaluation_loop:_EvaluationLoop.run",
    "loops.evaluation_loop:_EvaluationLoop.skip",
    "loops.evaluation_loop:_EvaluationLoop.num_dataloaders",
    "loops.evaluation_loop:_EvaluationLoop._is_sequential",
    "utilities.data:extract_batch_size(batch)",
)


def install() -> None:
    """Patch the installed Lightning, for every trainer of this process. Local and idempotent; every rank, or none.

    Patches ``lightning.pytorch`` and ``pytorch_lightning``, whichever are installed. A package that lacks what this
    relies on, whatever its version, is left unpatched, with a warning that names the difference. Does nothing under
    ``DDPSTATS_DISABLE=1``. With Trainer(callbacks=[DdpstatsCallback()]) instead, only that trainer changes.

    The errors of `ddpstats.StatsReducer` come from the hook at which the values are combined, the same on every rank:
    `SchemaConflict` where ranks log one key with different ``reduce_fx``, `RankMissing` where a rank does not come.

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
        _hold(id(self))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        _release(id(self))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        _release(id(self))


def _hold(user: int) -> None:
    for library, patches in _patches.items():
        root = ROOTS[library]
        if patches.should_patch([f"{root}.{name}" for name in _RELIED_ON], partial(_probe, root)):
            _patch(patches, root)
    _users.add(user)


def _release(user: int) -> None:
    _users.discard(user)
    if not _users:
        for patches in _patches.values():
            patches.restore()


def _probe(root: str) -> str | None:
    results = importlib.import_module(f"{root}.{_RESULT}")._ResultCollection(True)
    results.log("training_step", "a", torch.tensor(2.0), on_step=True, on_epoch=False, batch_size=1)
    metrics = results.metrics(on_step=True)["callback"]
    return None if metrics == {"a": 2.0} else f"gives {metrics} for what was logged as a = 2.0"


def _patch(patches: Patches, root: str) -> None:
    collection = importlib.import_module(f"{root}.{_RESULT}")._ResultCollection
    disable: Callable[..., Any] = torch.compiler.disable
    patches.replace(collection, "log", disable(in_place_of(collection.log, _log)))
    call = importlib.import_module(f"{root}.trainer.call")
    patches.wrap(call, "_call_callback_hooks", _call_callback_hooks)
    patches.wrap(call, "_call_lightning_module_hook", _call_module_hook)
    loop = importlib.import_module(f"{root}.loops.evaluation_loop")._EvaluationLoop
    patches.wrap(loop, "run", _run)
    patches.replace(loop, "skip", property(partial(_skip, loop.skip.fget)))


# -- what this rank has logged, and what all ranks make of it ----------------------------------------------------------

_MARKERS: dict[str, Any] = {
    "mean": markers.Mean,
    "avg": markers.Mean,
    "sum": markers.Sum,
    "min": markers.Min,
    "max": markers.Max,
}
_POINTS = ("on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")
_STARTS = {"on_train_start": "train", "on_validation_start": "validation", "on_test_start": "test"}
# The hook under whose name Lightning keeps the combined values.
_FX = "ddpstats"
# A key is "NAME in HOOK", in evaluations with several loaders "NAME in HOOK of loader INDEX".
_LOADER = " of loader "
# Settings of a key that hold for all ranks where one has them: shown by loggers, shown in the progress bar, on_step
# and on_epoch in one, the loader's number in its name, a result in float64.
_FLAGS = ("logger", "prog_bar", "forked", "suffixed", "float64")


class _Logged:
    """The keys that this rank has logged in one loop (training, validation, test) since all ranks combined them.

    Attributes:
        any_has_late_hook: whether on some rank keys may be logged after those of a batch were combined. Agreed.
    """

    def __init__(self, stage: str, has_late_hook: bool) -> None:
        self.any_has_late_hook = False
        self._has_late_hook = has_late_hook
        self._flags: dict[str, dict[str, bool]] = {}
        self._step: dict[str, Any] = {}
        self._epoch = StatsWindow(name=f"lightning/{stage}")
        self._batch: dict[str, Any] = {}
        self._batch_size = 1

    def add_step(self, key: str, value: Any, flags: dict[str, bool]) -> None:
        self._flags[key], self._step[key] = flags, value

    def add_epoch(self, key: str, value: Any, batch_size: int, flags: dict[str, bool]) -> None:
        if key in self._batch or batch_size != self._batch_size:
            self._add_batch()
        self._flags[key], self._batch[key], self._batch_size = flags, value, batch_size

    def _add_batch(self) -> None:
        """Add what was logged with one batch size at once: one copy from the device."""
        self._epoch.add({"self.log": self._batch}, weight=self._batch_size)
        self._batch = {}

    def combine_step(self) -> Any:
        """Return the step's keys of all ranks. Collective."""
        stats = {"self.log": self._step, **self._flags_of(self._step), "late": markers.Any(self._has_late_hook)}
        self._step = {}
        combined = reduce_stats(stats, name="lightning/step").values
        self.any_has_late_hook = combined["late"]
        return combined

    def combine_epoch(self) -> Any:
        """Return the epoch's keys of all ranks since the last time. Collective."""
        self._add_batch()
        self._epoch.add(self._flags_of(self._flags))
        self._step = {}
        return self._epoch.flush().values

    def _flags_of(self, keys: Any) -> dict[str, dict[str, Any]]:
        return {flag: {key: markers.Any(self._flags[key][flag]) for key in keys} for flag in _FLAGS}


def _find_logged(results: Any) -> _Logged | None:
    """Return what belongs to a result collection of Lightning; None where Lightning reduces by itself."""
    return None if results is None else results.__dict__.get("_ddpstats")


def _log(original: Callable[..., Any], self: Any, fx: str, name: str, value: Any, **settings: Any) -> None:
    logged = _find_logged(self)
    reduce_fx = settings.get("reduce_fx", "mean")
    marker = _MARKERS.get(str(getattr(reduce_fx, "__name__", reduce_fx)).lower())
    is_ours = settings.get("sync_dist") and settings.get("sync_dist_group") is None and isinstance(value, torch.Tensor)
    if fx.startswith(_FX) or logged is None or marker is None or not is_ours or settings.get("rank_zero_only"):
        original(self, fx, name, value, **settings)
        return
    key = f"{name} in {fx}" + ("" if self.dataloader_idx is None else f"{_LOADER}{self.dataloader_idx}")
    on_step, on_epoch, value = settings["on_step"], settings["on_epoch"], value.detach()
    flags = {
        **{flag: settings[flag] for flag in ("logger", "prog_bar")},
        "forked": on_step and on_epoch,
        "suffixed": settings.get("add_dataloader_idx", True),
        "float64": value.dtype == torch.float64,
    }
    if on_step and self.training:
        logged.add_step(key, marker(value), flags)
    if on_epoch or not self.training:
        needs_size = on_epoch and marker is markers.Mean
        batch_size = _batch_size(self, settings.get("batch_size")) if needs_size else 1
        logged.add_epoch(key, marker(value), batch_size, flags)


def _batch_size(results: Any, batch_size: int | None) -> int:
    """Return the batch size as Lightning finds it, which also keeps it for the other keys of this batch."""
    if batch_size is None and results.batch_size is None and results.batch is not None:
        root = type(results).__module__.partition(".trainer.")[0]
        results.batch_size = importlib.import_module(f"{root}.utilities.data").extract_batch_size(results.batch)
    size = results.batch_size if batch_size is None else batch_size
    return 1 if size is None else size


# -- the hooks that every rank passes ----------------------------------------------------------------------------------


def _call_callback_hooks(original: Callable[..., Any], trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
    if hook_name in _STARTS:
        logged = _Logged(_STARTS[hook_name], _has_late_hook(trainer)) if _is_ours(trainer) else None
        trainer._results.__dict__["_ddpstats"] = logged
    if hook_name in _POINTS and not kwargs.get("monitoring_callbacks"):
        _combine(trainer, hook_name)
    original(trainer, hook_name, *args, **kwargs)


def _call_module_hook(original: Callable[..., Any], trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    output = original(trainer, hook_name, *args, **kwargs)
    logged = _find_logged(trainer._results) if hook_name in _POINTS else None
    if logged is not None and (hook_name != "on_train_batch_end" or logged.any_has_late_hook):
        _combine(trainer, hook_name)
    return output


def _run(original: Callable[..., Any], self: Any) -> Any:
    """Run an evaluation loop; whether it is skipped all ranks decide together, once."""
    if _is_ours(self.trainer):
        vars(self)["_ddpstats_skips"] = None
    try:
        return original(self)
    finally:
        vars(self).pop("_ddpstats_skips", None)


def _skip(original: Callable[[Any], bool], loop: Any) -> bool:
    """Return whether no rank has a batch for the loop that runs: a rank without one passes the hooks of the others.

    Outside of a run, and for trainers that are left alone, what Lightning says of this rank.
    """
    own = vars(loop)
    if "_ddpstats_skips" not in own:
        return original(loop)
    if own["_ddpstats_skips"] is None:
        own["_ddpstats_skips"] = not any_rank(not original(loop))
    return bool(own["_ddpstats_skips"])


def _is_ours(trainer: Any) -> bool:
    is_asked = 0 in _users or any(isinstance(callback, DdpstatsCallback) for callback in trainer.callbacks)
    return is_asked and trainer._accelerator_connector.is_distributed


def _has_late_hook(trainer: Any) -> bool:
    """Return whether the module, or a callback not from Lightning or ddpstats, has a hook at the end of a batch."""
    hooks = [owner.on_train_batch_end for owner in (trainer.lightning_module, *trainer.callbacks)]
    packages = {str(getattr(hook, "__module__", "")).partition(".")[0] for hook in hooks}
    return not packages <= {*ROOTS, "ddpstats"}


def _combine(trainer: Any, hook_name: str) -> None:
    """Combine what was logged since the last time, and log it on this rank. Collective, one reduction."""
    results = trainer._results
    logged = _find_logged(results)
    if logged is None:
        return
    on_step = hook_name == "on_train_batch_end"
    combined = logged.combine_step() if on_step else logged.combine_epoch()
    loop = None if results.training else trainer._evaluation_loop
    has_several_loaders = loop is not None and loop._is_sequential and loop.num_dataloaders > 1
    numbers = combined.get("self.log", {})
    values = torch.tensor([*numbers.values()], dtype=torch.get_default_dtype(), device=trainer.strategy.root_device)
    for key, value in zip(numbers, values.unbind(), strict=True):
        name, _, where = key.rpartition(" in ")
        _, _, index = where.partition(_LOADER)
        results.dataloader_idx = int(index) if index else None
        if combined["float64"][key]:
            value = torch.tensor(numbers[key], dtype=torch.float64, device=value.device)
        shown = {flag: combined[flag][key] for flag in ("logger", "prog_bar", "suffixed")}
        if combined["forked"][key]:
            _show(results, f"{name}_{'step' if on_step else 'epoch'}", value, on_step, **shown)
            shown |= {"logger": False, "prog_bar": False}
        _show(results, name, value, on_step, **shown)
    results.dataloader_idx = None
    if has_several_loaders:
        _update_outputs(trainer, loop)


def _show(
    results: Any, name: str, value: torch.Tensor, on_step: bool, *, logger: bool, prog_bar: bool, suffixed: bool
) -> None:
    """Log a combined value in Lightning, which does not reduce it again."""
    index = results.dataloader_idx
    fx = _FX if index is None else f"{_FX}, loader {index}"
    key = f"{fx}.{name}.{index}" if suffixed and index is not None else f"{fx}.{name}"
    meta = results[key].meta if key in results else None
    if meta is not None and on_step and (meta.on_step, meta.logger, meta.prog_bar) == (True, logger, prog_bar):
        results.update_metrics(key, value, 1)  # without the checks of ``log``
        return
    results.pop(key, None)
    level = {"on_step": on_step, "on_epoch": not on_step}
    shown = {"logger": logger, "prog_bar": prog_bar, "add_dataloader_idx": suffixed}
    results.log(fx, name, value, **level, **shown, sync_dist=True, batch_size=1)  # False is warned of


def _update_outputs(trainer: Any, loop: Any) -> None:
    """Give each loader of an evaluation its values, also those that had no batch on this rank."""
    loop._logged_outputs = []
    for index in range(loop.num_dataloaders):
        loop._results.dataloader_idx = index
        loop._logged_outputs.append(trainer._logger_connector.update_eval_epoch_metrics())
    loop._results.dataloader_idx = None


# -- a StatsWindow in the trainer's own rows ---------------------------------------------------------------------------

WINDOW_RELIES_ON = (
    "callbacks",
    "callback_metrics",
    "fast_dev_run",
    "log_every_n_steps",
    "loggers",
    "fit_loop._should_accumulate",
    "fit_loop.epoch_loop._batches_that_stepped",
)


def attach_window(trainer: Any, flush: Callable[[], dict[str, float]]) -> None:
    """Flush a window in the batches that ``trainer`` logs; see `ddpstats.integrations.loggers.write_window`."""
    trainer.callbacks.insert(0, _WindowCallback(flush))  # before those that read in the same hook what was logged in it


class _WindowCallback(Callback):  # type: ignore[misc]  # a class found at run time
    def __init__(self, flush: Callable[[], dict[str, float]]) -> None:
        super().__init__()
        self._flush = flush

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if _is_logged(trainer, pl_module):
            pl_module.log_dict(_tensors(self._flush()), on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        rest = self._flush()
        trainer.callback_metrics.update(_tensors(rest))
        for logger in trainer.loggers if rest else ():  # self.log is over
            logger.log_metrics(metrics=rest, step=_step(trainer) - 1)


def _step(trainer: Any) -> int:
    """Return the step as Lightning gives it to loggers."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _is_logged(trainer: Any, module: Any) -> bool:
    """Return what Lightning decides of a batch, but for ``trainer.should_stop``, which a rank may have set alone."""
    if module.automatic_optimization and trainer.fit_loop._should_accumulate():
        return False
    every = trainer.log_every_n_steps
    return bool(trainer.fast_dev_run) or bool(every and (_step(trainer) + 1) % every == 0)


def _tensors(scalars: dict[str, float]) -> dict[str, torch.Tensor]:
    """Return exact tensors in host memory, where loggers read them."""
    return {name: torch.tensor(value, dtype=torch.float64, device="cpu") for name, value in scalars.items()}


# -- non-finite gradients ----------------------------------------------------------------------------------------------


class DdpstatsNaNCapture(TrainerCapture, Callback):  # type: ignore[misc]  # a class found at run time
    """`ddpstats.NaNCapture` in a Lightning trainer: every rank's trainer, or none. On Lightning's own hooks:

    ==========================  =======================================================================================
    on_train_start              `NaNCapture` is made, with the module as the strategy wraps it
    on_train_batch_start        a micro-batch begins: the batch is on its device, nothing of it has been run
    on_before_backward          its loss is kept, as Lightning differentiates it
    on_before_optimizer_step    it ends, and all ranks judge the step: gradients are unscaled and not yet clipped
    on_train_batch_end          it ends, where gradients only accumulate; the step goes on
    on_exception                it ends with that error, which the other ranks get to know
    on_train_end                hooks and thread go
    ==========================  =======================================================================================

    With ``on_nonfinite="stop"`` no rank applies the step, and every rank's trainer stops after this batch: as with
    Lightning's EarlyStopping not before ``min_epochs`` and ``min_steps``, until which such steps are left out. With
    "skip" the step is left out and the run goes on; with "continue" it is applied as it is. A step that is left out
    has no gradients (None), so the optimizer does nothing; schedulers and ``global_step`` go on, as in Lightning's own
    skips under a GradScaler.

    Covered: automatic optimization with ``accumulate_grad_batches``, clipping, mixed precision, any strategy that
    leaves the module's own parameters in place; also optimizers that call the closure repeatedly. Manual optimization
    with one or more optimizers: each ``optimizer.step()`` of a LightningOptimizer is judged as a separate step. The
    first one of a batch can be replayed; for those after it the bundle holds the batch, but the random state of the
    moment of their backward pass. Manual ``loss.backward()`` without ``self.manual_backward`` is seen too, but not
    after the first step of a batch. Not covered: strategies whose engine steps by itself (DeepSpeed).

    Args:
        dirpath: where bundles go, a directory of their own each. All ranks must see the same file system.
        on_nonfinite, keep, store_batch: as `ddpstats.NaNCapture`.
        settings: further arguments of `ddpstats.NaNCapture`: ``max_bytes``, ``max_scaler_skips``, ``group``, ...

    Attributes:
        verdict: the last one that was not ok; of several in a row the first, which has the bundle. None if all were.

    Raises, in the hooks: as `ddpstats.NaNCapture.check`, on every rank.

    Replay: ``ddpstats replay BUNDLE --model PKG:FACTORY --step ddpstats.integrations.lightning:step``. The factory
    returns the LightningModule itself.

    Example::

        stopper = DdpstatsNaNCapture("captures")
        Trainer(devices=2, callbacks=[stopper]).fit(module, loader)
        stopper.verdict     # rank 0 and rank 1: culprit_ranks (1,), where rank 1's batch made the NaN
    """

    _batch: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        model = trainer.strategy.model
        self._steps.start(pl_module if model is None else model, getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batch = batch
        self._steps.begin(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        micro = self._steps.micro
        if micro is None:  # once more in this batch: after a manual step, or a closure that is called repeatedly
            self._steps.begin(self._batch)
        elif pl_module.automatic_optimization:
            micro.loss = loss.detach()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        verdict = self._steps.check()
        if verdict is not None and verdict.should_stop:
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batch = None
        self._steps.end()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        # The module's own on_train_batch_start may return -1: no batch is run, and on_train_batch_end is not called.
        self._batch = None
        self._steps.discard()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        explain(exception, self._steps.end(exception))
        self._close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._batch = None
        self._steps.close()


def step(module: Any, batch: Any) -> Any:
    """The loss of a Lightning module for ``ddpstats replay --step``: what its ``training_step`` returns. Local.

    Bit for bit what Lightning differentiates, unless ``training_step`` looks at ``batch_idx`` (0 here) or the trainer
    (the module has none here, and ``self.log`` only warns), the loss was divided by ``accumulate_grad_batches``, or the
    precision plugin had autocast on: then write a function like this, with that division or under ``torch.autocast``.
    """
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    output = module.training_step(batch, 0) if takes_index else module.training_step(batch)
    return output["loss"] if isinstance(output, Mapping) else output
