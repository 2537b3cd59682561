"""Non-finite gradients in espnet's Trainer: caught on the rank where they arise, before anything is clipped or applied.

While `capture` is active, `Trainer.train_one_epoch` is wrapped, and sees ``torch`` through a view in which
``torch.nn.utils.clip_grad_norm_`` is ours; no other caller of that function notices.

1. A micro-batch begins where the trainer calls the model: the batch is on its device, and one that the trainer drops,
   because another rank has none left, never counts.
2. Where the trainer clips (gradients are unscaled and have their noise by then), the step is judged by all ranks.
3. With ``accum_grad`` above 1 a micro-batch ends where the next one begins. What an epoch leaves over belongs to the
   first step of the next one, as the trainer's gradients do. The trainer reduces gradients in every micro-batch, so in
   the later ones a replay of one rank has its own gradients where the capture had the sum: losses equal, norms do not.
4. What `train_one_epoch` raises ends the running micro-batch: the other ranks are told.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ddpstats.capture.verdict import Policy
from ddpstats.errors import ConfigError, NonFiniteStat
from ddpstats.integrations.capture_steps import CaptureSteps, TrainerCapture
from ddpstats.integrations.patches import Patches, pip_command

_patches = Patches("espnet")

_PARAMETERS = "model, iterator, optimizers, schedulers, scaler, reporter, summary_writer, options, distributed_option"
_TRAINER = "espnet2.train.trainer"
_RELIED_ON = (f"{_TRAINER}:Trainer.train_one_epoch({_PARAMETERS})",)


class Capturing(TrainerCapture):
    """What `capture` yields.

    Attributes:
        verdict: the last one that was not ok; of several in a row the first, which has the bundle. None if all were.
    """

    _model: Any = None

    def epoch(self, original: Callable[..., Any], trainer: Any, arguments: Mapping[str, Any]) -> Any:
        """One epoch of the trainer, watched."""
        model, steps = arguments["model"], self._steps
        if model is not self._model:  # an epoch's last gradients belong to the next epoch's first step
            self._model = model
            states = {"optimizer": list(arguments["optimizers"]), "scheduler": list(arguments["schedulers"])}
            steps.start(model, arguments["scaler"], **states)
        with _watching(model, steps):
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
        """The trainer's call of ``clip_grad_norm_``: before it, the step is judged."""
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
    """`ddpstats.NaNCapture` in espnet's Trainer, while the context is active. Every rank must enter it, or none.

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
    if _patches.is_installed:
        raise ConfigError("ddpstats.integrations.espnet.capture() inside another one: a trainer has one capture")
    capturing = Capturing(dirpath, on_nonfinite=on_nonfinite, keep=keep, store_batch=store_batch, **settings)
    if not _patches.is_disabled():
        espnet_module(_TRAINER)
    if _patches.should_patch(_RELIED_ON):
        _patch(capturing)
    try:
        yield capturing
    finally:
        _patches.restore()
        capturing.close()


def step(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The model's loss for ``ddpstats replay --step``. Local.

    The trainer weights it by the batch's share in all ranks' batches, and divides it by ``accum_grad``. That factor is
    in the bundle and applied by replay, so gradients come out bit for bit.

    Args:
        model: an espnet model: returns (loss, stats, weight), or a dict of them.
        batch: the keyword arguments of its forward pass, with ``utt_id``.
    """
    loss: torch.Tensor = _loss_in(model(**batch))
    return loss


def _patch(capturing: Capturing) -> None:
    module = espnet_module(_TRAINER)
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
    _patches.replace(module.Trainer, "train_one_epoch", classmethod(train_one_epoch))
    _patches.replace(module, "torch", _View(torch, nn=_View(torch.nn, utils=utils)))


class _View:
    """A module in which some names are others; the module itself stays as it is."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def _watching(model: Any, steps: CaptureSteps) -> Iterator[None]:
    """A micro-batch begins with each forward pass, before anything else sees its arguments."""

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


def espnet_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"ddpstats.integrations.espnet needs espnet, but {name} cannot be imported: {error}. "
            f"{pip_command('espnet')}"
        ) from error
