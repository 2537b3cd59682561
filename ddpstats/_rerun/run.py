"""A kept micro-batch, run again: by capture from a bundle or in the same process, by sentinel on its rank or a peer.

`alone` is around what one rank runs while the others wait. A `Runner` gives a fresh copy of the batch, sets the random
state and the autocast settings that the micro-batch had, and calls the user's step.

Who differentiates, and from which state of the module, is the caller's, because these are two ideas. Capture goes
through all micro-batches of a step on a module that it may change, from the captured parameters, and lets gradients
accumulate as the step did. Sentinel asks for one micro-batch's gradients on the module in use, beside ``.grad``. Both
set the switches that change last bits (`numerics_settings.as_in`) around all of it.

What made a step go wrong is told by where it goes wrong again, from the same state:

1. The rank itself runs it again. Not wrong each time: a transient fault of its hardware, or a race.
2. Wrong each time: the next rank that can (`from_rank_on`) runs it from what the first one hands over. Right there: the
   hardware of the first rank, or what only that rank holds outside of what was handed over.
3. Wrong there, too: software or data. In other precisions the rank itself finds out whether digits were lacking.

Ranks that wait for an answer are told what failed (`attempt`). What is wrong only the caller knows: capture a gradient
that is not finite, sentinel a value that is not normal on that rank. A vote among replicas is another idea and stands
in the sentinel: there nobody knows what is right, and the majority is taken for it.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe import collectives
from ddpstats._observe.operators import Collective
from ddpstats._observe.torch_compat import in_backward
from ddpstats._rerun.codec import from_plain
from ddpstats._rerun.record import Packet
from ddpstats._rerun.state import Autocast, RandomState
from ddpstats.errors import BundleError, ConfigError

Step = Callable[[nn.Module, Any], Any]

WIDER = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class RunSettings:
    """How to run: ``precision`` is captured, amp, fp32 or fp64."""

    device: torch.device
    precision: str = "captured"
    amp_dtype: torch.dtype | None = None


@contextmanager
def alone(what: str, device: torch.device) -> Iterator[None]:
    """One rank runs ``what``, the user's function, while the others wait; the random state is put back afterwards.

    No collective may run in this thread, or in a backward pass: `ConfigError`. Those of other threads, such as a
    checkpoint that is written meanwhile on a group of its own, go on as they do.
    """
    watcher, before = _Refusing(what), RandomState.take(device)
    collectives.subscribe(watcher)
    try:
        yield
    finally:
        collectives.unsubscribe(watcher)
        before.restore()


class Runner:
    """Runs micro-batches on a module whose state is as it should be. Local.

    Args:
        step: the user's ``fn(module, batch)``, which returns the loss.
        name: of ``step``, for messages.
        whose: the micro-batches are, for messages.
    """

    def __init__(self, module: nn.Module, step: Step, name: str, settings: RunSettings, whose: str) -> None:
        self._module, self._step, self._name, self._settings, self._whose = module, step, name, settings, whose

    def batch(self, packet: Packet) -> Any:
        """A copy of its own, on the device and in the precision of the run. Raises `BundleError` for what is none."""
        return from_plain(packet.batch, self._settings.device, WIDER.get(self._settings.precision))

    @contextmanager
    def as_kept(self, packet: Packet) -> Iterator[None]:
        """Around forward and backward pass: checkpointing computes forward passes in the backward pass.

        Raises:
            BundleError: the random state is none.
        """
        with torch.enable_grad(), self._autocast(packet.autocast):
            try:
                RandomState.from_plain(packet.random, self._settings.device).restore()
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
                raise BundleError(
                    f"{self._whose}: the random state is not one: {type(error).__name__}: {error}; the bundle is "
                    "damaged or hostile"
                ) from None
            yield

    def loss(self, packet: Packet, batch: Any) -> Tensor:
        """The step's loss times the trainer's factor: one element.

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
        hint = ""
        if isinstance(value, Mapping) and "loss" in value:
            hint = ": return its entry 'loss'"
        elif isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor):
            hint = ": return its first element, if that is the loss"
        raise ConfigError(f"{self._name} must return the loss, a tensor of one element, and it returned {what}{hint}")

    def scaled(self, loss: Tensor, scale: float) -> Tensor:
        """``loss`` times a GradScaler's ``scale``, to be differentiated. Raises `ConfigError` where it cannot be."""
        if not loss.requires_grad:
            raise ConfigError(
                f"{self._name} returned a loss that no parameter has a part in: was it detached, or under no_grad?"
            )
        return (loss if scale == 1.0 else loss * scale).sum()

    def _autocast(self, kept: Autocast | None) -> AbstractContextManager[None]:
        kind, precision = self._settings.device.type, self._settings.precision
        if precision in WIDER:
            return _without_autocast()
        if precision == "amp":
            default = torch.bfloat16 if kind == "cpu" else torch.float16
            own = kept.dtype if kept is not None and kept.enabled else default
            return self._under(self._settings.amp_dtype or own, True)
        if kept is None:
            return nullcontext()
        return self._under(kept.dtype if kept.enabled or kept.device_type == kind else None, kept.enabled)

    def _under(self, dtype: torch.dtype | None, enabled: bool) -> AbstractContextManager[None]:
        kind = self._settings.device.type
        return _forward_under(self._module, lambda: torch.autocast(kind, dtype=dtype, enabled=enabled))


class _Refusing:
    def __init__(self, what: str) -> None:
        self._what, self._thread = what, threading.get_ident()

    def before(self, call: Collective) -> None:
        # An accelerator's part of a backward pass runs in threads of autograd's own.
        if threading.get_ident() != self._thread and not in_backward():
            return
        raise ConfigError(f"{self._what} communicates ({call.op}), and only one rank runs it here")

    def after(self, call: Collective, work: Any) -> None:
        pass

    def waiting(self, work: Any, limited: bool) -> bool:
        return False


@contextmanager
def _forward_under(model: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Every forward pass of ``model`` runs under a new ``context()``; what the step does around it does not."""
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


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Also where the user's step asks for it."""
    enter = torch.autocast.__enter__

    def disabled(self: Any) -> Any:
        self._enabled = False
        return enter(self)  # type: ignore[no-untyped-call]

    torch.autocast.__enter__ = disabled  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


class Cause(enum.Enum):
    """By what is wrong again."""

    TRANSIENT = "not each time on the same rank"
    UNTOLD = "on the same rank, and no other one could run it"
    HARDWARE = "on the same rank, and not on another one"
    SOFTWARE_OR_DATA = "on another rank, too"


def cause_of(wrong_here: Iterable[object], wrong_there: object) -> Cause:
    """``wrong_here``: of each run on the rank itself; ``wrong_there``: on a peer, None where none could run it."""
    if not all(wrong_here):
        return Cause.TRANSIENT
    if wrong_there is None:
        return Cause.UNTOLD
    return Cause.SOFTWARE_OR_DATA if wrong_there else Cause.HARDWARE


def from_rank_on(ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """``rank``, the next one, and so on around: the order in which ranks are asked to run a step of ``rank``'s."""
    place = ranks.index(rank)
    return (*ranks[place:], *ranks[:place])


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``run`` returns, or {"error": words}: other ranks wait for an answer."""
    try:
        return run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
