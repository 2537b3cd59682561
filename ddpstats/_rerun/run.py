"""A kept micro-batch, run again: on a module that was loaded for it, or live, on the module in use.

`run_alone` is around what one rank runs while the others wait. A `Runner` gives a fresh copy of the batch, sets the
random state and the autocast settings that the micro-batch had, and calls the user's step. `Reruns` does so on the
module in use: it packs micro-batches into plain data that can go to another rank, and runs such a packet.

Gradients of a live rerun are taken by ``torch.autograd.grad``: nothing is accumulated into ``.grad``, and no hook on an
accumulated gradient runs: not DistributedDataParallel's, nor that of an optimizer inside the backward pass. The
program's own forward hooks do run. Afterwards the random state, the buffers (the very tensors, and their values) and
plain attributes of modules (numbers, strings, tuples of these) are as they were before the rerun.

Limits of live reruns:

- What modules keep in lists, dicts and other objects is not put back, and no attribute is set to what it was before the
  step: a step that acts on the number of its forward passes is another step when it is run again.
- Reentrant checkpointing cannot be differentiated this way. It says so, unless the segment's inputs want no gradient:
  then its parameters silently get none. ``use_reentrant=False`` is needed there.
- An optimizer inside the backward pass has changed the parameters by now.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe import collectives
from ddpstats._observe.operators import Collective
from ddpstats._observe.torch_compat import in_backward
from ddpstats._ranks.gather import is_ordinary
from ddpstats._rerun.codec import from_plain, tensor_text, to_plain
from ddpstats._rerun.record import MicroBatch, PackedStep, Packet, StepRecord
from ddpstats._rerun.state import Autocast, RandomState, as_in, put_back, set_buffers, switches
from ddpstats.errors import BundleError, ConfigError

StepFunction = Callable[[nn.Module, Any], Any]

_running = 0
WIDER = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run; ``precision`` is captured, amp, fp32 or fp64."""

    device: torch.device
    precision: str = "captured"
    amp_dtype: torch.dtype | None = None


@contextmanager
def run_alone(what: str, device: torch.device) -> Iterator[None]:
    """Run ``what``, the user's function, on one rank while the others wait; put the random state back afterwards.

    No collective may run in this thread, or in a backward pass: `ConfigError`. Those of other threads, such as a
    checkpoint that is written meanwhile on another group, go on as they do.
    """
    global _running
    watcher, before = _Refusing(what), RandomState.take(device)
    collectives.subscribe(watcher)
    _running += 1
    try:
        yield
    finally:
        _running -= 1
        collectives.unsubscribe(watcher)
        before.restore()


def is_rerun() -> bool:
    """Return whether what runs now is a rerun, and no part of the training."""
    return _running > 0


class Runner:
    """Runs micro-batches on a module whose state is as it should be. Local.

    Args:
        step: the user's ``fn(module, batch)``, which returns the loss.
        name: of ``step``, for messages.
        whose: the micro-batches are, for messages.
    """

    def __init__(self, module: nn.Module, step: StepFunction, name: str, settings: RunSettings, whose: str) -> None:
        self._module, self._step, self._name, self._settings, self._whose = module, step, name, settings, whose

    def batch(self, packet: Packet) -> Any:
        """Return a copy of the batch, on the device and in the precision of the run. Raises `BundleError`."""
        return from_plain(packet.batch, self._settings.device, WIDER.get(self._settings.precision))

    @contextmanager
    def restore_state(self, packet: Packet) -> Iterator[None]:
        """Set what the micro-batch had, around forward and backward pass: checkpointing runs forward passes in it.

        Raises:
            BundleError: it is not a random state.
        """
        with torch.enable_grad(), self._autocast(packet.autocast):
            try:
                RandomState.from_plain(packet.random, self._settings.device).restore()
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
                raise BundleError(
                    f"{self._whose}: the random state is not one: {type(error).__name__}: {error}: it is "
                    "damaged or hostile"
                ) from None
            yield

    def loss(self, packet: Packet, batch: Any) -> Tensor:
        """Return the step's loss times the trainer's factor: one element.

        Raises:
            ConfigError: it is no loss. And what the user's step raises.
        """
        value, factor = self._step(self._module, batch), packet.factor
        what = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            if factor is not None and (value.numel() == 1 or factor.shape in (value.shape, ())):
                return (value * factor.to(value.device)).sum()
            if value.numel() == 1:
                return value
            what = f"a tensor of shape {tuple(value.shape)}"
        raise ConfigError(f"{self._name} must return the loss, a tensor of one element, and it returned {what}")

    def scale_loss(self, loss: Tensor, scale: float) -> Tensor:
        """Return ``loss`` times a GradScaler's ``scale``, to be differentiated. Raises `ConfigError`."""
        if not loss.requires_grad:
            raise ConfigError(
                f"{self._name} returned a loss that no parameter has a part in: was it detached, or under no_grad?"
            )
        return (loss if scale == 1.0 else loss * scale).sum()

    def _autocast(self, kept: Autocast | None) -> AbstractContextManager[None]:
        kind, precision = self._settings.device.type, self._settings.precision
        dtype, enabled = self._settings.amp_dtype, precision == "amp"
        if enabled:
            default = torch.bfloat16 if kind == "cpu" else torch.float16
            dtype = dtype or (kept.dtype if kept is not None and kept.enabled else default)
        elif precision == "captured":
            if kept is None:
                return nullcontext()
            dtype, enabled = kept.dtype if kept.enabled or kept.device_type == kind else None, kept.enabled
        # around the module's forward pass: so it counts where the user's step asks for autocast itself
        return _forward_under(self._module, lambda: torch.autocast(kind, dtype=dtype, enabled=enabled))


class _Refusing(collectives.Subscriber):
    def __init__(self, what: str) -> None:
        self._what, self._thread = what, threading.get_ident()

    def before(self, call: Collective) -> None:
        # An accelerator's part of a backward pass runs in threads of autograd's own.
        if threading.get_ident() != self._thread and not in_backward():
            return
        raise ConfigError(f"{self._what} communicates ({call.op}), and only one rank runs it here")


@contextmanager
def _forward_under(model: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run every forward pass of ``model`` under a new ``context()``; what the step does around it is not."""
    forward, own = model.forward, "forward" in vars(model)

    def wrapped(*args: Any, **named: Any) -> Any:
        with context():
            return forward(*args, **named)

    model.forward = wrapped
    try:
        yield
    finally:
        if own:
            model.forward = forward
        else:
            del model.forward


class BatchChanged(ConfigError):
    """Raised for a micro-batch whose batch was changed in place. From the next one on, copies are kept."""


@dataclass(frozen=True)
class Rerun:
    """The result of one rerun of a packet.

    Attributes:
        losses: of each micro-batch, without a GradScaler's scale.
        gradients: of all micro-batches together, one per parameter that wants a gradient; None where none came.
        compiled: whether a part of the step was compiled, so that other programs may round otherwise.
    """

    losses: list[Tensor]
    gradients: list[Tensor | None]
    compiled: bool


class Reruns:
    """Packs and runs micro-batches of the step under way on the module in use. Local.

    Args:
        record: of the step under way; its module is what runs.
        step: ``fn(module, batch)``, returns what ``backward()`` was called on, before a GradScaler's scale.
        name: of ``step``, for messages.
        scale: of the GradScaler, now; 1.0 without.
    """

    def __init__(self, record: StepRecord, step: StepFunction, name: str, scale: Callable[[], float]) -> None:
        self.record, self._step, self._name, self._scale = record, step, name, scale

    @property
    def names(self) -> list[str]:
        """Return the names of the parameters that `Rerun.gradients` are of."""
        return [name for name, parameter in self.record.module.named_parameters() if parameter.requires_grad]

    def pack(self, micro_batches: Sequence[MicroBatch]) -> PackedStep:
        """Return micro-batches as plain data, for `run` on any rank that has the same parameters.

        Raises `BatchChanged`; `CannotStore` or `ConfigError` for what cannot be sent.
        """
        packed = []
        for micro in micro_batches:
            if micro.look_for_changes():
                path = next(iter(micro.changed), "the batch")  # it is gone where the program took it out
                raise BatchChanged(f"{path} was changed in place during the step")
            factor = None if micro.factor is None else micro.factor.detach().cpu()  # with the scale in it
            autocast = None if micro.autocast is None else Autocast(*micro.autocast)  # a caller may set a tuple
            packed.append(Packet(to_plain(micro.batch), micro.random.to_plain(), autocast, factor))
        buffers = dict(self.record.buffers or {})
        for name, buffer in buffers.items():
            if not is_ordinary(buffer):
                raise ConfigError(f"the buffer {name} is {tensor_text(buffer)}, which is not sent to other ranks")
        return PackedStep(tuple(packed), buffers, self._scale(), switches())

    def run(self, step: PackedStep) -> Rerun:
        """Run what `pack` made. Raises what the user's step raises; ConfigError if it returns no loss, or communicates.

        Buffers that ``step`` does not bring are those of this rank's own step.
        """
        module, device, losses, compiled = self.record.module, self.record.device, list[Tensor](), self.is_compiled
        runner = Runner(module, self._step, self._name, RunSettings(device), "the micro-batch that is run again")
        wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
        total: list[Tensor | None] = [None] * len(wanted)
        with run_alone(self._name, device), put_back(module), as_in(step.switches):
            set_buffers(module, {**(self.record.buffers or {}), **step.buffers})
            for micro in step.micro_batches:
                batch = runner.batch(micro)
                with runner.restore_state(micro):
                    loss = runner.loss(micro, batch)
                    loss = runner.scale_loss(loss, 1.0 if micro.factor is not None else step.scale)
                    compiled |= _has_compiled_part(loss)
                    gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, wanted, allow_unused=True)
                losses.append(loss.detach() / step.scale)
                total = [a if b is None else b if a is None else a + b for a, b in zip(total, gradients, strict=True)]
        return Rerun(losses, total, compiled)

    @property
    def is_compiled(self) -> bool:
        """Return whether the module's forward pass was compiled in this step, or a part of it is TorchScript."""
        is_script = any(isinstance(part, torch.jit.ScriptModule) for part in self.record.module.modules())
        return is_script or any(micro.compiled for micro in self.record.micro_batches)


def _has_compiled_part(loss: Tensor) -> bool:
    """Return whether ``torch.compile`` made some part of the loss's graph."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if node.name().startswith("CompiledFunction"):
                return True
            nodes += [following for following, _ in node.next_functions]
    return False
