"""The current step, kept so that it can be run once more: batches, random state and buffers.

For each optimizer step:

1. `begin` of a micro-batch takes the batch by reference, notes the version counter of each of its tensors, and takes
   the random state: after loading, because a loader may draw from the process's own generators.
2. The first forward pass of the step copies the module's buffers, inside the module: by then DistributedDataParallel
   has broadcast rank 0's. The first forward pass of each micro-batch notes the autocast settings.
3. `end` looks whether the batch was changed in place. If it was, later batches are copied at `begin`: a reference is
   of no use there. So are arrays of numpy, which count no versions.
4. `clear` forgets the step.

Memory: one step's batches stay alive as long as the step, and one copy of the buffers. Nothing is drawn from any
generator.

A `Packet` is a kept micro-batch as plain data: what a bundle holds of it, and what travels to a peer that runs it.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
)

from ddpstats._base.lazy import refuse_without_values
from ddpstats._base.text import holders_lines
from ddpstats._observe.gradients import ForwardBegins, unwrapped
from ddpstats._observe.torch_compat import copy_each, version_of
from ddpstats._ranks.calls import channel_of
from ddpstats._ranks.gather import gather_trees
from ddpstats._rerun.state import Autocast, RandomState as RandomState, buffer_places, device_of
from ddpstats.errors import ConfigError


@dataclass
class MicroBatch:
    """One micro-batch, as it was just before its forward pass.

    Attributes:
        batch: containers of its own around the caller's very tensors; around copies where these must be.
        random: the generators' state.
        autocast: as it was when the module was called first; None before that.
        loss: what was differentiated, without a GradScaler's scale; if the caller says so.
        factor: what a trainer multiplied the step's own loss by before ``backward()``, with a GradScaler's scale: of
            the shape of that loss, or a number; None where the step's own loss was differentiated.
        changed: paths of tensors that were changed in place since.
        compiled: whether ``torch.compile`` made the forward pass; True, too, where none was seen.
    """

    batch: Any
    random: RandomState
    autocast: Autocast | None = None
    loss: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    changed: tuple[str, ...] = ()
    compiled: bool = True
    _tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def look_for_changes(self) -> bool:
        """Whether some tensor was changed in place since the micro-batch began."""
        moved = {id(tensor) for tensor, version in self._tensors if version_of(tensor) != version}
        if moved:
            self.changed = tuple(path for path, leaf in walk(self.batch) if id(leaf) in moved)
        return bool(moved)


class StepRecord:
    """The current optimizer step of ``model``, on this rank. Local.

    Args:
        model: as it is trained.

    Attributes:
        module: inside any DistributedDataParallel: its forward pass is the moment at which buffers are as they count.
        micro_batches: since `clear`.
        buffers: name -> copy, as before the step; the next step overwrites it.
        copies: whether batches are copied, because one was changed in place; the caller may set it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = module = unwrapped(model)
        self.micro_batches: list[MicroBatch] = []
        self.buffers: dict[str, torch.Tensor] | None = None
        self.copies = False
        self._current: MicroBatch | None = None
        self._copies = BufferCopies(module)
        self._handle = module.register_forward_pre_hook(
            ForwardBegins(module, self, StepRecord._about_to_run, module is not model), prepend=True
        )

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return device_of(self.module)

    def begin(self, batch: Any) -> MicroBatch:
        """A micro-batch is about to run. Its forward and backward pass come before `end`."""
        keeping = _Keeping(self.copies)
        kept = keeping.keep(batch)
        self._current = MicroBatch(kept, RandomState.take(self.device), _tensors=keeping.tensors)
        self.micro_batches.append(self._current)
        return self._current

    def end(self) -> None:
        """The micro-batch is through."""
        current, self._current = self._current, None
        if self.buffers is None:  # a program that calls other methods of the module than its forward
            self.buffers = self._copies.take()
        if current is not None and current.look_for_changes():
            self.copies = True

    def clear(self) -> None:
        """The step is over: let go of its batches."""
        self.micro_batches = []
        self.buffers = None
        self._current = None

    def close(self) -> None:
        """Take the hook away. Idempotent."""
        self._handle.remove()
        self._copies.close()
        self.clear()

    def _about_to_run(self, compiled: bool) -> None:
        current = self._current
        if current is None:
            return
        if self.buffers is None:
            self.buffers = self._copies.take()
        if current.autocast is None:
            kind = self.device.type
            current.autocast = Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            current.compiled = compiled


class BufferCopies:
    """A copy of every buffer of a module, taken anew into the same memory as long as the buffers stay the same ones."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
        self._known: list[torch.Tensor] = []
        self._copies: dict[str, torch.Tensor] = {}
        self._twins: list[torch.Tensor] = []
        self._outdated = True
        reference = weakref.ref(self)

        def registered(module: torch.nn.Module, name: str, value: Any) -> None:
            copies = reference()
            if copies is not None:
                copies._outdated = True

        # Walking all modules costs more than the copies: only where some module got a buffer or a module.
        self._handles = [
            register_module_buffer_registration_hook(registered),
            register_module_module_registration_hook(registered),
        ]

    def take(self) -> dict[str, torch.Tensor]:
        """Name -> copy, as of now. The next call overwrites them. Local."""
        with torch.no_grad():
            if self._outdated or not self._is_as_known():
                self._learn()
            if self._twins:
                copy_each(self._twins, self._known)
        return self._copies

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        for handle in self._handles:
            handle.remove()

    def _is_as_known(self) -> bool:
        return all(owner.get(key) is buffer for owner, key, buffer in self._places) and all(
            buffer.shape == twin.shape for buffer, twin in zip(self._known, self._twins, strict=True)
        )

    def _learn(self) -> None:
        self._outdated = False
        places = list(buffer_places(self._module))
        self._places = [place[:3] for place in places]
        known = {name: buffer for _, _, buffer, name in places}
        self._copies = {name: torch.empty_like(buffer) for name, buffer in known.items()}
        self._known, self._twins = list(known.values()), list(self._copies.values())


class _Keeping:
    """Makes new containers, so that a key taken out later is still there, around the leaves themselves, or copies.

    What cannot be made anew is kept itself: a list or tuple of a class of its own, what lies inside itself, and what is
    nested too deeply.

    Attributes:
        tensors: those that were not copied, each with its version.
    """

    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self.tensors: list[tuple[torch.Tensor, int]] = []

    def keep(self, value: Any, around: tuple[int, ...] = ()) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if is_endless(value, around):
            return value
        around = (*around, id(value))
        if isinstance(value, Mapping):
            return {key: self.keep(item, around) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return self._sequence(value, around)
        if is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value, around)
        return value.copy() if type(value).__module__ == "numpy" and hasattr(value, "copy") else value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if self._copies or value.is_inference():  # which counts no versions
            return value.detach().clone()
        self.tensors.append((value, version_of(value)))
        return value

    def _sequence(self, value: list[Any] | tuple[Any, ...], around: tuple[int, ...]) -> Any:
        items = [self.keep(item, around) for item in value]
        if type(value) is list:
            return items
        if isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_fields")):
            return tuple.__new__(type(value), items)  # a named one may have a __new__ of its own
        return value

    def _dataclass(self, value: Any, around: tuple[int, ...]) -> Any:
        twin = copy.copy(value)
        for name in set_fields(value):
            object.__setattr__(twin, name, self.keep(getattr(value, name), around))
        return twin


@dataclass(frozen=True)
class Packet:
    """What it takes to run a micro-batch again, but for the state of its module.

    Attributes:
        batch: as `codec.to_plain` wrote it.
        random: as `RandomState.to_plain` wrote it.
        autocast: of the module's forward pass; None where it never began.
        factor: what the trainer multiplied the step's loss by; None for 1.
    """

    batch: Any
    random: dict[str, Any]
    autocast: Autocast | None
    factor: Tensor | None

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Packet:
        """What `plain_packet` made."""
        autocast = plain["autocast"]
        autocast = None if autocast is None else Autocast.from_plain(autocast)
        return cls(plain["batch"], plain["random"], autocast, plain["factor"])


def plain_packet(micro: MicroBatch, batch: Any, factor: Tensor | None) -> dict[str, Any]:
    """``batch``: of ``micro``, as `codec.to_plain` writes it; ``factor``: on the CPU."""
    autocast = None if micro.autocast is None else Autocast(*micro.autocast).to_plain()  # a caller may set a tuple
    return {"batch": batch, "random": micro.random.to_plain(), "autocast": autocast, "factor": factor}


def tensor_bytes(value: Any) -> int:
    """Of the tensors in nested containers."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in walk(value) if isinstance(leaf, Tensor))


T_co = TypeVar("T_co", covariant=True)
W = TypeVar("W", bound="StepWatch")

_MOST_STEPS = 10**15


class Owner(Protocol[T_co]):
    """The object that handed out the micro-batch, and hears of its begin and end."""

    def _begin(self, running: Any, batch: Any, /) -> T_co:
        """What the context gives. Raises where a micro-batch cannot begin now."""

    def _end(self, error: BaseException | None, /) -> BaseException | None:
        """The micro-batch ended, or raised ``error``. Returns what to raise in place of that; None leaves it."""


class Running(Generic[T_co]):
    """Around the forward and backward pass of one micro-batch; entered once."""

    def __init__(self, owner: Owner[T_co], batch: Any) -> None:
        self._owner, self._batch, self._entered = owner, batch, False

    def __enter__(self) -> T_co:
        if self._entered:
            raise ConfigError("this micro_batch() was entered before; each micro-batch takes one of its own")
        batch, self._batch, self._entered = self._batch, None, True
        return self._owner._begin(self, batch)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        other = self._owner._end(error)
        if other is not None:
            raise other from error


class StepWatch:
    """Base of what watches one optimizer step after the other, and judges it on all ranks of ``group`` together.

    A copy of one, as of a module that keeps it, is closed.

    Args:
        method: what judges the step, for messages: "NaNCapture.check".
    """

    def __init__(self, method: str, group: Any) -> None:
        channel = channel_of(group)
        self._method, self._group = method, group
        self._ranks, self._rank = tuple(channel.ranks), int(channel.rank)
        self._step = 0
        self._running: Running[Any] | None = None
        self._problem: Exception | None = None  # of this rank, until every rank hears of it
        self._agreed = False  # all ranks made theirs with the same settings
        self._closed = ""  # why nothing can begin any more

    def _closes(self, *closing: Callable[[], None]) -> None:
        """What takes hooks and threads away, at `close` or once nobody holds this; so none of it may hold this."""
        self._finalizer = weakref.finalize(self, _close_all, closing)

    def close(self) -> None:
        """Take hooks and threads away. Local; idempotent."""
        if not self._closed:
            self._closed = "after close()"
            self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        """A copy is closed: what is watched is the model that was given, and no copy of it."""
        closed = f"of a copy, which watches nothing: make a {type(self).__name__} for the copied model"
        state = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {
            **state,
            "_method": self._method,
            "_step": self._step,
            "_closed": closed,
            "_running": None,
            "_group": None,
        }

    def __enter__(self: W) -> W:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refuse_micro_batch(self) -> None:
        """Raises `ConfigError` where none can begin now."""
        if self._closed or self._running is not None:
            raise ConfigError(f"micro_batch() {self._closed or 'inside another micro_batch()'}")

    def _refuse_to_judge(self) -> None:
        """Raises where a step cannot be judged now. Comes first: a step that is not judged is not forgotten."""
        if self._closed or self._running is not None:
            raise ConfigError(f"{self._method}() {self._closed or 'inside micro_batch()'}")
        refuse_without_values(self._method)

    def _gathered(self, tree: Callable[[], Any], what: str) -> dict[int, Any]:
        """Every rank's tree, by global rank. Collective."""
        found = gather_trees(tree, name=f"{self._method}: {what}", group=self._group)
        return dict(zip(self._ranks, found, strict=True))

    def _agree_on(self, settings: Mapping[str, Any], advice: str, **besides: Any) -> dict[int, Any]:
        """Once: a verdict is the same on every rank only if all were told to do the same. Collective.

        ``advice``: as `refuse_differences`. Returns each rank's ``besides``, by global rank.
        """
        told = self._gathered(lambda: {"settings": settings, **besides}, "settings")
        own = {rank: tree["settings"] for rank, tree in told.items()}
        refuse_differences(own, self._method.partition(".")[0], advice)
        self._agreed = True
        return told


def _close_all(closing: Sequence[Callable[[], None]]) -> None:
    for close in closing:
        close()


def checked_step(step: Any, call: str) -> int:
    """The caller's number of a step. Raises `ConfigError`, which names ``call``."""
    try:
        found = operator.index(step)
    except TypeError:
        found = -1
    if not 0 <= found < _MOST_STEPS:
        raise ConfigError(f"{call}(step={step!r}): a whole number, 0 or more")
    return found


def scale_of(scaler: Any) -> float | None:
    """Of a GradScaler, now; None where there is none, or it is off."""
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None


def refuse_differences(by_rank: Mapping[int, Mapping[str, Any]], what: str, advice: str) -> None:
    """Raise `ConfigError` on every rank if the settings of ranks differ: their verdicts could not agree.

    Args:
        by_rank: each rank's settings by name; the same mapping on every rank.
        what: the objects that are made with these settings.
        advice: the last sentence of the message.
    """
    first = next(iter(by_rank.values()))
    differing = [name for name in first if any(settings[name] != first[name] for settings in by_rank.values())]
    if differing:
        texts = {rank: ", ".join(f"{name}={own[name]!r}" for name in differing) for rank, own in by_rank.items()}
        lines = [f"ranks made their {what} with different settings:", *holders_lines(texts), advice]
        raise ConfigError("\n".join(lines), ranks=by_rank)


_MOST_DEEP = 200  # a bundle holds 64 levels of the user's, and writes up to three more for each


def walk(value: Any, path: str = "batch", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf, in order. A container that contains itself, or lies too deep, is a leaf.

    ``around``: the ids of the containers that ``value`` is in.
    """
    items = None if is_endless(value, around) else _items(value)
    if items is None:
        yield path, value
        return
    for step, item in items:
        yield from walk(item, path + step, (*around, id(value)))


def _items(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return the items of a container, each with its step of the path; None for a leaf."""
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", item) for key, item in value.items())
    names = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and isinstance(names, tuple) and len(names) == len(value):
        return ((f".{name}", item) for name, item in zip(names, value, strict=True))
    if isinstance(value, (list, tuple)):
        return ((f"[{index}]", item) for index, item in enumerate(value))
    if type(value) is SimpleNamespace:  # represents a dataclass in a bundle
        return ((f".{name}", item) for name, item in vars(value).items())
    if is_dataclass(value) and not isinstance(value, type):
        return ((f".{name}", getattr(value, name)) for name in set_fields(value))
    return None


def is_endless(value: Any, around: tuple[int, ...]) -> bool:
    """Return whether a value contains itself, or lies too deep to be stored."""
    return len(around) > _MOST_DEEP or id(value) in around


def set_fields(value: Any) -> list[str]:
    """Return the names of a dataclass's fields that have a value."""
    return [field.name for field in fields(value) if hasattr(value, field.name)]
