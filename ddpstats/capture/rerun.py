"""One captured step, run again in this process, as often as wanted.

1. `Rerun` checks that the module has the captured parameters and buffers, by name and shape.
2. Each `Rerun.run` puts everything back: parameters, buffers as before the step, train and eval modes, which parameters
   want gradients; no gradients.
3. Each micro-batch is run as it was kept (`ddpstats._rerun.run`), and its backward pass.
4. After each: what the loss was, which gradients arrived and how large they are (`measure`), and which are
   not finite.

Threads, determinism and matrix precision are those of the capture while it runs.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._base.text import shorten
from ddpstats._observe.frames import calls_step
from ddpstats._observe.gradient_norms import held_values, measure, parts_of
from ddpstats._rerun.run import WIDER, Runner, RunSettings, Step
from ddpstats._rerun.state import as_in, numpy_or_none
from ddpstats.capture.parts import CapturedMicroBatch, RankPart
from ddpstats.errors import BundleError, ConfigError

_SHOWN_NAMES = 5


@dataclass
class Outcome:
    """What one run came to.

    Attributes:
        losses, norms: one per micro-batch that ran; ``norms`` are None where no backward pass was to run.
        gradients: those that arrived in the last micro-batch, in parts where they are sparse (`parts_of`).
        nonfinite: parameters whose gradient was not finite after some micro-batch.
        error: what the step raised.
        raised_in: the micro-batch in which it did.
    """

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor | None] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    nonfinite: list[str] = field(default_factory=list)
    error: Exception | None = None
    raised_in: int | None = None


class Observer:
    """Is told of a run from inside, and does not look; the one of `bisect` does."""

    def begin(self, place: int, batch: Any) -> None: ...

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def loss(self, place: int, loss: Tensor) -> None: ...

    def gradients(self, place: int, gradients: Mapping[str, Tensor]) -> None: ...


_NOBODY = Observer()


class Rerun:
    """A captured step and a module to run it on. Local.

    Args:
        model: from the user's factory; it is changed.
        step: the user's ``fn(model, batch)``.
        part: the rank's part of the bundle.
        parameters: by name.

    Attributes:
        part: the rank's part, with the names of ``model``.
        notes: what the reader of a result should know.

    Raises:
        ConfigError: the module is not the one of the capture; the message names what differs.
        BundleError: a batch is not in the bundle.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        part: RankPart,
        parameters: Mapping[str, Tensor],
        settings: RunSettings,
        *,
        raises: bool = False,
    ) -> None:
        self.notes: list[str] = []
        renaming = _Renaming(model)
        self.part = renaming.part(part)
        self.model, self._settings = model, settings
        self._runner = Runner(model, step, "--step", settings, f"rank {part.rank}")
        self._raises = raises  # the capture's step raised: its last micro-batch is run to the end, if it gets there
        self._parameters, self._buffers = renaming.by_name(parameters), dict(self.part.buffers)
        self._check_batches()
        self._check_model()
        self._check_packages()
        _on(settings.device, model)
        self.notes += _without_sync_batch_norm(model, settings.device)

    def run(self, observer: Observer = _NOBODY) -> Outcome:
        """Once, from the captured state. What the user's step raises is in the outcome, but `ConfigError` of ours."""
        self._restore()
        outcome = Outcome()
        with as_in(self.part.environment):
            for place, micro in enumerate(self.part.micro_batches):
                batch = self._runner.batch(micro)
                observer.begin(place, batch)
                try:
                    self._run_micro_batch(place, micro, batch, observer, outcome)
                except (ConfigError, BundleError):
                    raise
                except SystemExit as error:
                    raise ConfigError(f"--step ended the process, with status {error.code!r}") from error
                except Exception as error:
                    outcome.error, outcome.raised_in = error, place
                    break
        return outcome

    @calls_step
    def _run_micro_batch(
        self, place: int, micro: CapturedMicroBatch, batch: Any, observer: Observer, outcome: Outcome
    ) -> None:
        arrived: dict[str, None] = {}
        with _arrivals(self.model, arrived), self._runner.as_kept(micro):
            with observer.watching():
                loss = self._runner.loss(micro, batch)
            outcome.losses.append(loss.detach().clone())
            observer.loss(place, loss)
            backward = micro.norms is not None or self._raises
            if backward:
                with observer.watching():
                    self._runner.scaled(loss, self.part.scale).backward()  # type: ignore[no-untyped-call]
        self._note_gradients(place, arrived if backward else None, observer, outcome)

    def _note_gradients(
        self, place: int, arrived: dict[str, None] | None, observer: Observer, outcome: Outcome
    ) -> None:
        if arrived is None:
            outcome.norms.append(None)
            return
        named = dict(self.model.named_parameters())
        outcome.norms.append(measure([one.grad if name in arrived else None for name, one in named.items()]))
        found = {name: one.grad for name, one in named.items() if one.grad is not None}
        outcome.gradients = {
            part: tensor for name in found if name in arrived for part, tensor in parts_of(name, found[name]).items()
        }
        finite = measure(list(found.values())).isfinite().tolist()
        bad = [name for name, fine in zip(found, finite, strict=True) if not fine]
        outcome.nonfinite += [name for name in bad if name not in outcome.nonfinite]
        observer.gradients(place, {name: held_values(gradient) for name, gradient in found.items()})

    # -- before a run -------------------------------------------------------------------------------------------------

    def _check_batches(self) -> None:
        if not self.part.micro_batches:
            raise ConfigError(f"rank {self.part.rank} had no batch in this step; choose another with --rank")
        for place, micro in enumerate(self.part.micro_batches):
            if micro.batch_missing is not None:
                raise BundleError(
                    f"rank {self.part.rank}: the batch of micro-batch {place} is not in the bundle: "
                    f"{micro.batch_missing}. Nothing can be replayed without it; choose another rank, or capture again."
                )
            if micro.changed:
                self.notes.append(
                    f"micro-batch {place}: {shorten(micro.changed, _SHOWN_NAMES)} was changed in place during the "
                    "step; the replay gets the values as they were afterwards"
                )

    def _check_model(self) -> None:
        _same_names("parameter", dict(self.model.named_parameters()), self._parameters)
        buffers = dict(self.model.named_buffers())
        if buffers and not self._buffers:
            self.notes.append("the capture has no buffers (no forward pass had begun): those of the factory are used")
        else:
            _same_names("buffer", buffers, self._buffers)
        dtypes = {name: one.dtype for name, one in self.model.named_parameters()}
        other = [name for name, value in self._parameters.items() if value.dtype != dtypes[name]]
        if other:
            self.notes.append(
                f"the factory's module has another dtype for {shorten(other, _SHOWN_NAMES)}; the captured one is used"
            )

    def _check_packages(self) -> None:
        if any(micro.random.get("numpy") is not None for micro in self.part.micro_batches) and numpy_or_none() is None:
            self.notes.append(
                "numpy is not installed here, and the capture has the state of its random generator; a step that does "
                "not use numpy needs neither, for any other: pip install numpy"
            )

    def _restore(self) -> None:
        device, dtype = self._settings.device, WIDER.get(self._settings.precision)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.data = _moved(self._parameters[name], device, dtype)
                parameter.requires_grad_(name not in self.part.frozen and _differentiable(parameter))
                parameter.grad = None
            for name, buffer in self.model.named_buffers():
                buffer.data = _moved(self._buffers.get(name, buffer.data), device, dtype)
        eval_modules = {_plain_name(name) for name in self.part.eval_modules}
        for name, module in self.model.named_modules():
            module.training = _plain_name(name) not in eval_modules


# -- the module -------------------------------------------------------------------------------------------------------


class _Renaming:
    """From the capture's names to the module's: only one of the two may have gone through torch.compile."""

    def __init__(self, model: nn.Module) -> None:
        found = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        self._names = {_plain_name(name): name for name in found}

    def name(self, captured: str) -> str:
        name, space, part = captured.partition(" ")  # of a sparse gradient: `parts_of`
        return self._names.get(_plain_name(name), name) + space + part

    def by_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.name(name): tensor for name, tensor in tensors.items()}

    def part(self, part: RankPart) -> RankPart:
        return replace(
            part,
            parameter_names=[self.name(name) for name in part.parameter_names],
            buffers=self.by_name(part.buffers),
            frozen=[self.name(name) for name in part.frozen],
            gradients=None if part.gradients is None else self.by_name(part.gradients),
        )


def _plain_name(name: str) -> str:
    """Without the module that torch.compile puts around another."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _same_names(what: str, built: Mapping[str, Tensor], captured: Mapping[str, Tensor]) -> None:
    """Raises `ConfigError` that names what is missing, too much, or of another shape."""
    missing = [name for name in captured if name not in built]
    extra = [name for name in built if name not in captured]
    both = [name for name in captured if name in built]
    shapes = [
        f"{name} is {tuple(built[name].shape)}, captured {tuple(captured[name].shape)}"
        for name in both
        if built[name].shape != captured[name].shape
    ]
    lines = [f"  captured, and not in the module: {shorten(missing, _SHOWN_NAMES)}"] if missing else []
    lines += [f"  in the module, and not captured: {shorten(extra, _SHOWN_NAMES)}"] if extra else []
    lines += [f"  other shapes: {shorten(shapes, _SHOWN_NAMES)}"] if shapes else []
    if lines:
        hint = "Let --model make the module as it was trained, without DistributedDataParallel around it."
        raise ConfigError(
            "\n".join([f"--model makes another module than the captured one, by its {what}s:", *lines, hint])
        )


def _on(device: torch.device, model: nn.Module) -> None:
    try:
        model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"the module does not go to --device {device}: {error}") from error


def _moved(value: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """A copy: a step may change its module."""
    return value.detach().to(device, dtype if value.is_floating_point() else None, copy=True)


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _without_sync_batch_norm(model: nn.Module, device: torch.device) -> list[str]:
    """torch's SyncBatchNorm refuses the CPU. Where every rank holds the same batch, BatchNorm normalizes alike."""
    found = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    if not found or device.type != "cpu":
        return []
    for module in found:
        module.forward = types.MethodType(nn.BatchNorm1d.forward, module)  # type: ignore[method-assign]
    what = "1 SyncBatchNorm module normalizes" if len(found) == 1 else f"{len(found)} SyncBatchNorm modules normalize"
    return [f"{what} over this rank's batch alone: torch has no SyncBatchNorm for the CPU"]


@contextlib.contextmanager
def _arrivals(model: nn.Module, arrived: dict[str, None]) -> Iterator[None]:
    """Which parameters get a gradient; a parameter's older gradient does not count."""
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.setdefault(name))  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
