"""A kept micro-batch run once more on the module as it stands, on this rank or on a peer.

1. `Reruns.packet` puts a micro-batch into plain data that can go to another rank: batch, random state, autocast, the
   loss's factor, and the switches of torch that change last bits.
2. `Reruns.run` sets all that and the buffers, runs the user's step, differentiates, and puts everything back.

Gradients are taken by ``torch.autograd.grad``: nothing is accumulated into ``.grad``, and no hook on an accumulated
gradient runs: not DistributedDataParallel's, nor that of an optimizer inside the backward pass. The program's own
forward hooks do run. Afterwards the random state, the buffers (the very tensors, and their values) and plain attributes
of modules (numbers, strings, tuples of these) are as they were before the rerun.

Limits:

- What modules keep in lists, dicts and other objects is not put back, and no attribute is set to what it was before the
  step: a step that acts on a count of its own forward passes is another step when it is run again.
- Reentrant checkpointing cannot be differentiated this way. It says so, unless the segment's inputs want no gradient:
  then its parameters silently get none. ``use_reentrant=False`` is needed there.
- An optimizer inside the backward pass has changed the parameters by now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats._observe.torch_compat import buffers_of
from ddpstats._rerun.no_collectives import forward_under, no_collectives
from ddpstats._rerun.numerics_settings import FLOAT_DTYPES, as_in, switches
from ddpstats._rerun.random_state import RandomState
from ddpstats._rerun.serialize import from_plain, to_plain
from ddpstats._rerun.step_record import MicroBatch, StepRecord
from ddpstats.errors import ConfigError
from ddpstats.sentinel._checkpoints import Checkpoints
from ddpstats.sentinel._gradient_digests import Witness

ReplayFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Outcome:
    """Of one run: the gradients' witness, and (checkpoint, value) as they came."""

    witness: Witness
    values: list[tuple[int, Tensor]]


class Reruns:
    """Packs and runs micro-batches of the step under way. Local: a step that communicates is refused.

    Args:
        record: of the step; its module is what runs.
        replay_fn: ``fn(module, batch)``, returns what ``backward()`` was called on, before a GradScaler's scale.
        checkpoints: of layer 1, whose values must not be mixed with a rerun's; None without.
        scale: of the GradScaler, now; 1.0 without.
    """

    def __init__(
        self, record: StepRecord, replay_fn: ReplayFn, checkpoints: Checkpoints | None, scale: Callable[[], float]
    ) -> None:
        self._record, self._replay_fn, self._checkpoints, self._scale = record, replay_fn, checkpoints, scale

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self._record.device

    @property
    def names(self) -> list[str]:
        """Of the parameters that a `Witness` is about."""
        return [name for name, parameter in self._record.module.named_parameters() if parameter.requires_grad]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """As before the step."""
        return dict(self._record.buffers or {})

    def packet(self, place: int) -> dict[str, Any] | None:
        """A micro-batch as plain data; None without one; {"error": words} where that is not to be had.

        {"changed": path, "error": words} for a batch that was changed in place: from the next one on, copies are kept.
        """
        if len(self._record.micro_batches) <= place:
            return None
        micro = self._record.micro_batches[place]
        if micro.look_for_changes():
            path = next(iter(micro.changed), "the batch")  # it is gone where the program took it out
            return {"changed": path, "error": f"{path} was changed in place during the step"}
        return attempt(lambda: _packed(micro, self._scale()))

    def run(self, packet: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> Outcome:
        """Raises what the user's step raises; ConfigError where it returns no loss, or communicates."""
        module, device = self._record.module, self.device
        wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
        values: list[tuple[int, Tensor]] = []
        with _put_back(module, device), ExitStack() as stack:
            stack.enter_context(no_collectives("replay_fn"))
            stack.enter_context(as_in(packet["switches"]))
            stack.enter_context(torch.enable_grad())
            if self._checkpoints is not None:
                values = stack.enter_context(self._checkpoints.redirected())
            _set_buffers(module, buffers)
            batch = from_plain(packet["batch"], device)
            RandomState.from_plain(packet["random"], device).restore()
            stack.enter_context(_autocast(module, packet["autocast"]))
            loss = _differentiated(self._replay_fn(module, batch), packet)
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            return Outcome(Witness.of(_strided(found, packet.get("strided", ()))), values)


def _strided(gradients: Sequence[Tensor | None], places: Collection[int]) -> list[Tensor | None]:
    """Without sparse ones at ``places``: in the step they were added to zeros that are not sparse."""
    return [
        one.to_dense() if one is not None and one.is_sparse and place in places else one
        for place, one in enumerate(gradients)
    ]


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``run`` returns, or {"error": words}: other ranks wait for an answer."""
    try:
        return run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def size_bytes(plain: Any) -> int:
    """Of the tensors in it."""
    if isinstance(plain, Tensor):
        return plain.numel() * plain.element_size()
    if isinstance(plain, Mapping):
        return sum(map(size_bytes, plain.values()))
    return sum(map(size_bytes, plain)) if isinstance(plain, (list, tuple)) else 0


def _packed(micro: MicroBatch, scale: float) -> dict[str, Any]:
    autocast = None
    if micro.autocast is not None:
        kind, enabled, dtype = micro.autocast
        autocast = {"device": kind, "enabled": enabled, "dtype": str(dtype)}
    return {
        "batch": to_plain(micro.batch),
        "random": micro.random.to_plain(),
        "autocast": autocast,
        "factor": None if micro.factor is None else micro.factor.detach().cpu(),
        "scale": scale,
        "switches": switches(),
    }


@contextmanager
def _put_back(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Random state, buffers and plain attributes are afterwards as they are now."""
    random, buffers = RandomState.take(device), _Buffers(module)
    attributes = [(one, _plain_attributes(one), set(vars(one))) for one in module.modules()]
    try:
        yield
    finally:
        random.restore()
        buffers.put_back()
        for one, kept, names in attributes:
            _put_attributes_back(vars(one), kept, names)


class _Buffers:
    """The buffers of all modules in ``module``, and their values, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [(buffers_of(one), dict(buffers_of(one))) for one in module.modules()]
        buffers = {id(buffer): buffer for _, kept in self._owners for buffer in kept.values() if buffer is not None}
        self._values = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]

    def put_back(self) -> None:
        for owner, kept in self._owners:
            if list(owner) != list(kept) or any(owner[key] is not buffer for key, buffer in kept.items()):
                owner.clear()
                owner.update(kept)
        with torch.no_grad():
            for buffer, value in self._values:
                if buffer.shape == value.shape:
                    buffer.copy_(value)
                else:  # resized in place
                    buffer.data = value


def _set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """In place, but where the step has put a tensor of another shape or dtype there: by a new one."""
    names: dict[int, str] = {}  # of a buffer that several modules share: the first one, as in ``named_buffers``
    made: dict[int, Tensor] = {}
    with torch.no_grad():
        for prefix, owner in module.named_modules():
            for key, buffer in list(buffers_of(owner).items()):
                if buffer is None:
                    continue
                value = values.get(names.setdefault(id(buffer), f"{prefix}.{key}" if prefix else key))
                if value is None:
                    continue
                if (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                    buffer.copy_(value)
                else:
                    new = made.setdefault(id(buffer), value.to(buffer.device, copy=True))
                    buffers_of(owner)[key] = new


_PLAIN = frozenset({int, float, bool, str, type(None)})


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _put_attributes_back(attributes: MutableMapping[str, Any], kept: Mapping[str, Any], names: set[str]) -> None:
    """``names``: of all attributes that there were; what is new came from the rerun."""
    for name in [one for one in attributes if one not in names]:
        del attributes[name]
    for name, value in kept.items():
        if attributes.get(name, _put_attributes_back) is not value:
            attributes[name] = value


@contextmanager
def _autocast(module: nn.Module, kept: Mapping[str, Any] | None) -> Iterator[None]:
    """The module's forward pass, and nothing around it, runs under the autocast that it had."""
    if kept is None:
        yield
        return
    kind, enabled, dtype = kept["device"], bool(kept["enabled"]), FLOAT_DTYPES.get(kept["dtype"])
    with forward_under(module, lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)):
        yield


def _differentiated(loss: Any, packet: Mapping[str, Any]) -> Tensor:
    factor = packet["factor"]
    if not isinstance(loss, Tensor) or (loss.numel() != 1 and factor is None):
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(f"replay_fn must return the loss, a tensor of one element, and it returned {what}")
    if not loss.requires_grad:
        raise ConfigError("replay_fn returned a loss that no parameter has a part in: was it detached?")
    scaled: Tensor = loss
    if factor is not None:
        scaled = loss * factor.to(loss.device)
    elif packet["scale"] != 1.0:
        scaled = loss * packet["scale"]
    return scaled.sum()
