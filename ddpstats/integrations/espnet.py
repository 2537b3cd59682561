"""espnet's trainers with right numbers, and with non-finite gradients caught where they arise.

**install.** Ranks may hold different stats, and each key keeps the weight of its mean.

1. `install` puts our `recursive_average`, `recursive_sum` and `recursive_divide` in the place of espnet's, where they
   are defined and in every espnet module that has imported them by name.
2. For a dict, that average is an `AveragedStats`: it remembers the weight of each key's mean.
3. `SubReporter.register` gets such a dict from the trainers. The wrapper around it hands espnet's own ``register`` each
   key with that weight, and lists and nested dicts under the names of `Reduced.flat`. Registered with the total weight
   instead, as stock espnet does it, a key that only some ranks hold makes the epoch's average wrong.

Covered, in training and validation: ``trainer``, ``gan_trainer``, ``deepspeed_trainer`` and ``uasr_trainer``, whose
phone error rate is a ratio of totals (its counts are summed over ranks, not averaged); and the loss balancer of
``gan_codec``.

espnet's models fill in NaN for "no such value on this rank", and its Reporter leaves NaN and infinity out. So here a
rank's non-finite value counts as absent (``nonfinite="skip"``); it is NaN only where no rank has a finite one.

Not covered, for it does not go through ``recursive_average``: the spk trainer's own gathering of scores; the Lightning
and speechlm trainers; the vocabulary in ``uasr_trainer``'s weighted_lm_ppl, which each rank takes from its own batches;
the step that the Reporter of a rank counts too many when another rank runs out of batches first.

**capture.** While `capture` is active, with `install` or without, `Trainer.train_one_epoch` is wrapped, and sees
``torch`` through a view in which ``torch.nn.utils.clip_grad_norm_`` is ours; no other caller of that function notices.

1. A micro-batch begins where the trainer calls the model: the batch is on its device, and one that the trainer drops,
   because another rank has none left, never counts.
2. Where the trainer clips (gradients are unscaled and have their noise by then), the step is judged by all ranks.
3. With ``accum_grad`` above 1 a micro-batch ends where the next one begins. What an epoch leaves over belongs to the
   first step of the next one, as the trainer's gradients do. The trainer reduces gradients in every micro-batch, so in
   the later ones a replay of one rank has its own gradients where the capture had the sum: losses equal, norms do not.
4. What `train_one_epoch` raises ends the running micro-batch, and is reported to the other ranks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ddpstats._base.paths import Step
from ddpstats._reduction.ops import Sum
from ddpstats.capture.verdict import Policy
from ddpstats.errors import ConfigError, NonFiniteStat
from ddpstats.integrations.capture_steps import CaptureSteps, TrainerCapture
from ddpstats.integrations.patches import Patches
from ddpstats.recursive_op import LeafAverage, average_with_weights, recursive_divide, recursive_sum

__all__ = ["AveragedStats", "Capturing", "capture", "install", "step", "uninstall"]

_PACKAGES = ("espnet2", "espnet3", "espnetez")
_RECURSIVE, _REPORTER, _TRAINER = "espnet2.torch_utils.recursive_op", "espnet2.train.reporter", "espnet2.train.trainer"
_EPOCH = "model, iterator, optimizers, schedulers, scaler, reporter, summary_writer, options, distributed_option"

_RELIED_ON = (
    f"{_RECURSIVE}:recursive_average(obj, weight, distributed)",
    f"{_RECURSIVE}:recursive_sum(obj, weight, distributed)",
    f"{_RECURSIVE}:recursive_divide(a, b)",
    f"{_REPORTER}:SubReporter.register(self, stats, weight)",
)
_CAPTURE_RELIES_ON = (f"{_TRAINER}:Trainer.train_one_epoch({_EPOCH})",)

# uasr_trainer divides sums of these over an epoch by one another. It asserts the first two, no other trainer has them.
_UASR_NEEDS = frozenset({"batch_num_errors", "batch_num_ref_tokens"})
_UASR_COUNTS = _UASR_NEEDS | {"batch_lm_log_prob", "batch_num_hyp_tokens", "batch_size"}

_patches = Patches("espnet")
_capture_patches = Patches("espnet")


# -- averages ---------------------------------------------------------------------------------------------------------


def install() -> None:
    """Patch the installed espnet, whether its trainers are imported already or later. Local and idempotent.

    Every rank must call it, or none. Your own modules that imported one of espnet's functions by name before this
    call keep the old one. An espnet that lacks what this relies on, whatever its version, is left unpatched, with a
    warning that names the difference. Does nothing under ``DDPSTATS_DISABLE=1``.

    Raises:
        ConfigError: espnet is not installed, or lacks what it needs itself.

    Example::

        rank 0: stats {"l1_loss": 0.057}   rank 1: stats {"snr_loss": -2.0}
        stock espnet logs l1_loss=-0.9715; after install() every rank's Reporter has l1_loss 0.057, snr_loss -2.0
    """
    if _patches.should_patch(_RELIED_ON, _probe):
        theirs, reporter = importlib.import_module(_RECURSIVE), importlib.import_module(_REPORTER)
        for name, ours in _OURS.items():
            for package in _PACKAGES:
                _patches.replace_everywhere(package, getattr(theirs, name), ours)
        _patches.wrap(reporter.SubReporter, "register", _register)


def uninstall() -> None:
    """Put espnet's own objects back, also into modules that were imported since `install`. Local and idempotent."""
    _patches.restore()


class AveragedStats(dict[Any, Any]):
    """The installed ``recursive_average`` returns this for a dict: a plain dict to all but the Reporter.

    A key whose value was replaced, or that was added, since the averaging has no separate weight.
    """

    def __init__(self, averages: Mapping[Any, Any], leaves: list[LeafAverage]) -> None:
        super().__init__(averages)
        self._averages = dict(averages)
        self._leaves: dict[Step, list[LeafAverage]] = {}
        for leaf in leaves:
            path, *_ = leaf
            self._leaves.setdefault(path[0], []).append(leaf)

    def rows(self) -> Iterator[tuple[Any, Any, float | None]]:
        """Yield (name, value, own weight) leaf by leaf; the weight is None where the caller's holds."""
        for key, value in self.items():
            if key in self._averages and self._averages[key] is value:
                for _, name, tensor, entry in self._leaves.get(key, ()):
                    # espnet keeps one type of entry per key: None must get a weight where a value of that key has one.
                    yield name, tensor, entry.weight if entry.op in ("mean", "none") else None
            else:
                yield key, value, None


def _recursive_average(obj: Any, weight: torch.Tensor, distributed: bool = False) -> tuple[Any, torch.Tensor]:
    """Call `ddpstats.recursive_average`, with each key's own weight in a dict's result."""
    if isinstance(obj, dict) and obj.keys() >= _UASR_NEEDS:
        obj = {key: Sum(value) if key in _UASR_COUNTS else value for key, value in obj.items()}
    averages, total, leaves = average_with_weights(obj, weight, distributed, "skip")
    return (AveragedStats(averages, leaves) if isinstance(averages, dict) else averages), total


_OURS: dict[str, Callable[..., Any]] = {
    "recursive_average": _recursive_average,
    "recursive_sum": recursive_sum,
    "recursive_divide": recursive_divide,
}


def _register(original: Callable[..., Any], self: Any, stats: Any, weight: Any = None) -> None:
    if not isinstance(stats, AveragedStats) or not stats:
        original(self, stats, weight)
        return
    for own, rows in groupby(stats.rows(), key=lambda row: row[2]):
        original(self, {name: value for name, value, _ in rows}, weight if own is None else own)


def _probe() -> str | None:
    average: Any = importlib.import_module(_RECURSIVE).recursive_average
    result = average({"a": torch.tensor([2.0, 5.0])}, torch.tensor([2.0, 1.0]), False)
    if result == ({"a": torch.tensor(3.0)}, torch.tensor(3.0)):
        return None
    return f"averages 2 and 5 with weights 2 and 1 to {result}, where 3 with weight 3 is relied on"


# -- non-finite gradients ----------------------------------------------------------------------------------------------


class Capturing(TrainerCapture):
    """`capture` yields this.

    Attributes:
        verdict: the last one that was not ok; of several in a row the first, which has the bundle. None if all were.
    """

    _model: Any = None

    def epoch(self, original: Callable[..., Any], trainer: Any, arguments: Mapping[str, Any]) -> Any:
        """Run one epoch of the trainer, with the model's forward passes observed."""
        model, steps = arguments["model"], self._steps
        if model is not self._model:  # an epoch's last gradients belong to the next epoch's first step
            self._model = model
            steps.start(model, arguments["scaler"])
        with _observe_forward(model, steps):
            try:
                result = original(trainer, **arguments)
            except BaseException as error:
                reason = steps.end(error)
                if reason is not None:
                    raise reason from error
                raise
        steps.end()
        return result

    def clip(self, original: Callable[..., Any], parameters: Any, *args: Any, **named: Any) -> Any:
        """Judge the step, and then make the trainer's call of ``clip_grad_norm_``."""
        verdict = self._steps.check()
        assert verdict is not None
        if verdict.should_stop:
            first = verdict.parameters[0] if verdict.parameters else None
            raise NonFiniteStat(verdict.message, ranks=verdict.culprit_ranks, path=first)
        norm = original(parameters, *args, **named)
        # The trainer leaves out a step whose norm is not finite: it neither steps nor counts it, on any rank.
        return torch.full_like(norm, torch.nan) if verdict.should_skip else norm

    def close(self) -> None:
        self._steps.close()


@contextlib.contextmanager
def capture(
    dirpath: str | Path, *, on_nonfinite: Policy = "stop", keep: int = 3, store_batch: bool = True, **settings: Any
) -> Iterator[Capturing]:
    """Run `ddpstats.NaNCapture` in espnet's Trainer, while the context is active. Every rank must enter it, or none.

    Covered: ``espnet2.train.trainer.Trainer`` and trainers that inherit its ``train_one_epoch``, with
    DistributedDataParallel and without, with AMP and ``accum_grad``. Not covered: the GAN, UASR, DeepSpeed and
    Lightning trainers, which have loops of their own. Works with `install` and without it. Where espnet's
    ``train_one_epoch`` has other parameters, warns and captures nothing; so it does, silently, under
    ``DDPSTATS_DISABLE=1``.

    A verdict to stop is raised on every rank in the same step, before it is applied. With "skip" the trainer leaves the
    step out, as it does by itself with a norm that is not finite: no optimizer, no scheduler. With "continue" it
    decides as always, which is the same for a norm that is not finite.

    Args:
        dirpath: where bundles go, a directory of their own each. All ranks must see the same file system.
        on_nonfinite, keep, store_batch: as `ddpstats.NaNCapture`.
        settings: further arguments of `ddpstats.NaNCapture`: ``max_bytes``, ``max_scaler_skips``, ``group``, ...

    Raises:
        NonFiniteStat: out of ``train_one_epoch``, on every rank; ``ranks`` are the culprits, ``path`` the first
            parameter, the message is the verdict's.
        RankMissing: in place of a broken connection's error, where another rank raised in ``train_one_epoch``.
        ConfigError: inside another `capture`; espnet is not installed.

    Replay: ``ddpstats replay BUNDLE --model PKG:FACTORY --step ddpstats.integrations.espnet:step``.

    Example::

        with espnet.capture("captures"):    # on every rank
            Trainer.run(...)                # rank 1's batch makes a NaN: ranks 0 and 1 raise NonFiniteStat, ranks (1,)
    """
    if _capture_patches.is_installed:
        raise ConfigError("ddpstats.integrations.espnet.capture() inside another one: a trainer has one capture")
    capturing = Capturing(dirpath, on_nonfinite=on_nonfinite, keep=keep, store_batch=store_batch, **settings)
    if _capture_patches.should_patch(_CAPTURE_RELIES_ON):
        _patch(capturing)
    try:
        yield capturing
    finally:
        _capture_patches.restore()
        capturing.close()


def step(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the model's loss for ``ddpstats replay --step``. Local.

    The trainer weights it by the batch's share in all ranks' batches, and divides it by ``accum_grad``. That factor is
    in the bundle and applied by replay, so gradients come out bit for bit.

    Args:
        model: an espnet model: returns (loss, stats, weight), or a dict of them.
        batch: the keyword arguments of its forward pass, with ``utt_id``.
    """
    loss: torch.Tensor = _loss_in(model(**batch))
    return loss


def _patch(capturing: Capturing) -> None:
    module: Any = importlib.import_module(_TRAINER)
    # the class's own entry: a classmethod, whose function takes the class that the epoch was asked of
    original = vars(module.Trainer)["train_one_epoch"].__func__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_one_epoch(cls: Any, *args: Any, **named: Any) -> Any:
        arguments = dict(signature.bind(cls, *args, **named).arguments)
        arguments.pop(next(iter(signature.parameters)))
        return capturing.epoch(original, cls, arguments)

    clip = functools.partial(capturing.clip, torch.nn.utils.clip_grad_norm_)
    utils = _View(torch.nn.utils, clip_grad_norm_=clip)
    _capture_patches.replace(module.Trainer, "train_one_epoch", classmethod(train_one_epoch))
    _capture_patches.replace(module, "torch", _View(torch, nn=_View(torch.nn, utils=utils)))


class _View:
    """A module in which some names are others; the module itself stays as it is."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def _observe_forward(model: Any, steps: CaptureSteps) -> Iterator[None]:
    """Begin a micro-batch with each forward pass, before other code sees its arguments."""

    def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        steps.begin(named)

    def after(module: Any, args: Any, output: Any) -> None:
        steps.note_loss(_loss_in(output))

    with (
        model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        model.register_forward_hook(after),
    ):
        yield


def _loss_in(output: Any) -> Any:
    return output["loss"] if isinstance(output, Mapping) else output[0]
