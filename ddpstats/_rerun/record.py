"""The current step, kept so that it can be run once more: batches, random state and buffers.

For each optimizer step:

1. `begin` of a micro-batch takes the batch by reference, notes the version counter of each of its tensors, and takes
   the random state: after loading, because a loader may draw from the process's own generators.
2. The first forward pass of the step copies the module's buffers, inside the module: by then DistributedDataParallel
   has broadcast rank 0's. The first forward pass of each micro-batch notes the autocast settings.
3. `end` looks whether the batch was changed in place. If it was, later batches are copied at `begin`: a reference is
   of no use there. So are arrays of numpy, which count no versions.
4. `clear` forgets the step, `drop_last` a micro-batch that an exception left. What such a one did to the buffers is
   known if no other one came before it in its step.

Memory: one step's batches stay alive as long as the step, and one copy of the buffers. Nothing is drawn from any
generator.

A `Packet` is a kept micro-batch as plain data: what a bundle holds of it. `PackedStep` is what travels to a peer.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ddpstats._base import config
from ddpstats._base.lazy import refuse_without_values
from ddpstats._base.text import holders_lines
from ddpstats._observe.gradients import ForwardBegins, unwrap
from ddpstats._observe.torch_compat import buffers_of, copy_each, version_of
from ddpstats._ranks.calls import channel_of
from ddpstats._ranks.device import record_event, widest_float
from ddpstats._ranks.gather import gather_trees
from ddpstats._rerun.state import Autocast, RandomState, device_of
from ddpstats.errors import ConfigError


@dataclass
class MicroBatch:
    """One micro-batch, as it was just before its forward pass.

    Attributes:
        batch: new containers around the caller's very tensors; around copies where these must be.
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
    loss: Tensor | None = None
    factor: Tensor | None = None
    changed: tuple[str, ...] = ()
    compiled: bool = True
    _tensors: list[tuple[Tensor, int]] = field(default_factory=list)

    def look_for_changes(self) -> bool:
        """Return whether some tensor was changed in place since the micro-batch began."""
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
        copies: whether batches are copied, because one was changed in place.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = module = unwrap(model)
        self.micro_batches: list[MicroBatch] = []
        self.buffers: dict[str, Tensor] | None = None
        self.copies = False
        self._current: MicroBatch | None = None
        self._copies = BufferCopies(module)
        self._handle = module.register_forward_pre_hook(
            ForwardBegins(module, self, StepRecord._about_to_run, module is not model), prepend=True
        )

    @property
    def device(self) -> torch.device:
        """The module's device."""
        return device_of(self.module)

    def begin(self, batch: Any) -> MicroBatch:
        """Keep a micro-batch that is about to run. Its forward and backward pass come before `end`."""
        keeping = _Keeping(self.copies)
        kept = keeping.keep(batch)
        self._current = MicroBatch(kept, RandomState.take(self.device), _tensors=keeping.tensors)
        self.micro_batches.append(self._current)
        return self._current

    def end(self) -> None:
        """End the micro-batch, and look whether its batch was changed."""
        current, self._current = self._current, None
        if self.buffers is None:  # a program that calls other methods of the module than its forward
            self.buffers = self._copies.take()
        if current is not None and current.look_for_changes():
            self.copies = True

    def drop_last(self) -> None:
        """The micro-batch that was ended last is no part of the step. A step begins with the first one that is."""
        del self.micro_batches[-1:]  # none is left after `close`
        if not self.micro_batches:
            self.buffers = None

    def clear(self) -> None:
        """Forget the step, which is over, and its batches."""
        self.micro_batches = []
        self.buffers = None
        self._current = None

    def close(self) -> None:
        """Take the hook away. Idempotent."""
        self._handle.remove()
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
    """Copies of a module's buffers, in the same memory as long as shapes stay. Modules that come later are left out."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._owners = [(f"{name}." if name else "", buffers_of(owner)) for name, owner in module.named_modules()]
        self._copies: dict[str, Tensor] = {}

    def take(self) -> dict[str, Tensor]:
        """Return the copies by name, as of now; a shared buffer has one name. The next call overwrites them. Local."""
        known: dict[int, tuple[str, Tensor]] = {}
        for prefix, buffers in self._owners:
            for key, buffer in buffers.items():
                if buffer is not None:
                    known.setdefault(id(buffer), (prefix + key, buffer))
        with torch.no_grad():
            self._copies = {name: self._memory_for(name, buffer) for name, buffer in known.values()}
            if known:
                copy_each(list(self._copies.values()), [buffer for _, buffer in known.values()])
        return self._copies

    def _memory_for(self, name: str, buffer: Tensor) -> Tensor:
        copy = self._copies.get(name)
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (copy, buffer) if tensor is not None]
        return copy if copy is not None and kinds[0] == kinds[1] else torch.empty_like(buffer)


class _Keeping:
    """Makes new containers, so that a key taken out later is still there, around the leaves themselves, or copies.

    A container that cannot be made again is kept itself: a list of a user's class, or one that contains itself.

    Attributes:
        tensors: those that were not copied, each with its version.
    """

    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self.tensors: list[tuple[Tensor, int]] = []

    def keep(self, value: Any, around: tuple[int, ...] = ()) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        container = _open(value, around)
        if container is not None:
            _, items, make = container
            return make([self.keep(item, (*around, id(value))) for item in items])
        return value.copy() if type(value).__module__ == "numpy" and hasattr(value, "copy") else value

    def _tensor(self, value: Tensor) -> Tensor:
        if self._copies or value.is_inference():  # which counts no versions
            return value.detach().clone()
        self.tensors.append((value, version_of(value)))
        return value


@dataclass(frozen=True)
class Packet:
    """All that a rerun of a micro-batch needs beside the state of its module.

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


@dataclass(frozen=True)
class PackedStep:
    """Micro-batches, and the rest that a rank with the same parameters needs to run them.

    Attributes:
        scale: of the GradScaler; 1.0 without.
        switches: of torch, by name.
    """

    micro_batches: tuple[Packet, ...]
    buffers: dict[str, Tensor]
    scale: float
    switches: dict[str, str | bool | int]


def tensor_bytes(value: Any) -> int:
    """Return the number of bytes of the tensors in nested containers."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in walk(value) if isinstance(leaf, Tensor))


def widen(tensor: Tensor) -> Tensor:
    """Return the tensor, or a wider copy of one in float8, whose elements torch cannot check."""
    is_float8 = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.to(widest_float(tensor.device)) if is_float8 else tensor


T_co = TypeVar("T_co", covariant=True)
W = TypeVar("W", bound="StepWatch")

_MOST_STEPS = 10**15
# Of the timeout: ranks wait in a gather while one runs a step twice. All have just answered a question of this step.
_GATHER_TIMEOUTS = 4


class Running(Generic[T_co]):
    """The context of one micro-batch's forward and backward pass; entered once.

    Args:
        owner: a `StepWatch`. Its ``_begin(running, batch)`` returns what the context gives; its ``_end(error)`` what to
            raise in place of the error, or None.
    """

    def __init__(self, owner: Any, batch: Any) -> None:
        self._owner, self._batch, self._entered = owner, batch, False

    def __enter__(self) -> T_co:
        if self._entered:
            raise ConfigError("this micro_batch() was entered before; each micro-batch takes one of its own")
        batch, self._batch, self._entered = self._batch, None, True
        value: T_co = self._owner._begin(self, batch)
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        replacement: BaseException | None = self._owner._end(error)
        if replacement is not None:
            raise replacement from error


class StepWatch:
    """Base of what watches one optimizer step after the other, and judges it on all ranks of ``group`` together.

    A copy of one, as of a module that keeps it, is closed.

    Args:
        method: the call that judges the step, in words, for messages.
    """

    def __init__(self, method: str, group: Any) -> None:
        channel = channel_of(group)
        self._method, self._group = method, group
        self._ranks, self._rank = tuple(channel.ranks), int(channel.rank)
        self._step = 0
        self._running: Running[Any] | None = None
        self._problem: Exception | None = None  # of this rank, until every rank raises it
        self._agreed = False  # all ranks made theirs with the same settings
        self._closed = ""  # why nothing can begin any more

    def _closes(self, *closing: Callable[[], None]) -> None:
        """Register what removes hooks and threads, at `close` or when this object is freed; it must not refer to it."""
        self._finalizer = weakref.finalize(self, _close_all, closing)

    def close(self) -> None:
        """Take hooks and threads away. Local; idempotent."""
        if not self._closed:
            self._closed = "after close()"
            self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which is closed: the original watches its model, and no copy of it."""
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
        """Raise `ConfigError` where no micro-batch can begin now."""
        if self._closed or self._running is not None:
            raise ConfigError(f"micro_batch() {self._closed or 'inside another micro_batch()'}")

    def _refuse_to_judge(self) -> None:
        """Raise where a step cannot be judged now. This comes first: a step that is not judged is not forgotten."""
        if self._closed or self._running is not None:
            raise ConfigError(f"{self._method}() {self._closed or 'inside micro_batch()'}")
        refuse_without_values(self._method)

    def _wait_for_devices(self, devices: Iterable[torch.device]) -> None:
        """Wait until all devices have done the step, in which one may wait for a rank that does not come.

        Raises:
            RankMissing: one has not by the timeout, or another rank has given up; the channel raises it from then on.
        """
        events = [event for event in map(record_event, dict.fromkeys(devices)) if event is not None]
        wait_until = channel_of(self._group).wait_until
        wait_until(lambda: all(event.query() for event in events), "the step on the device", config.timeout_sec(None))

    def _gather(self, tree: Callable[[], Any], what: str) -> dict[int, Any]:
        """Return every rank's tree, by global rank. Collective; waits as long as reruns of a step may take."""
        timeout_sec = _GATHER_TIMEOUTS * config.timeout_sec(None)
        trees = gather_trees(tree, name=f"{self._method}: {what}", group=self._group, timeout_sec=timeout_sec)
        return dict(zip(self._ranks, trees, strict=True))

    def _agree_on(self, settings: Mapping[str, Any], advice: str, **besides: Any) -> dict[int, Any]:
        """Refuse settings that differ between ranks, whose verdicts could not agree. Collective; called once.

        ``advice``: as `refuse_differences`. Return each rank's ``settings`` and ``besides``, by global rank.
        """
        trees = self._gather(lambda: {"settings": settings, **besides}, "settings")
        own = {rank: tree["settings"] for rank, tree in trees.items()}
        refuse_differences(own, self._method.partition(".")[0], advice)
        self._agreed = True
        return trees


def _close_all(closing: Sequence[Callable[[], None]]) -> None:
    for close in closing:
        close()


def check_step(step: Any, call: str) -> int:
    """Return the caller's number of a step. Raises `ConfigError`, which names ``call``."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < _MOST_STEPS:
        raise ConfigError(f"{call}(step={step!r}): a whole number, 0 or more")
    return number


def scale_of(scaler: Any) -> float | None:
    """Return the current scale of a GradScaler; None without one, or if it is off."""
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None


def refuse_differences(by_rank: Mapping[int, Mapping[str, Any]], what: str, advice: str) -> None:
    """Raise `ConfigError` on every rank if the settings of ranks differ: their verdicts could not agree.

    Args:
        by_rank: each rank's settings by name; the same mapping on every rank.
        what: the objects that are made with these settings.
        advice: the last sentence of the message.
    """
    first = next(iter(by_rank.values()))
    names = dict.fromkeys(name for settings in by_rank.values() for name in settings)
    differing = [name for name in names if any(own.get(name) != first.get(name) for own in by_rank.values())]
    if differing:
        texts = {rank: ", ".join(f"{name}={own.get(name)!r}" for name in differing) for rank, own in by_rank.items()}
        lines = [f"ranks made their {what} with different settings:", *holders_lines(texts), advice]
        raise ConfigError("\n".join(lines), ranks=by_rank)


_MOST_DEEP = 200  # a bundle holds 64 levels of the user's, and writes up to three more for each


def walk(value: Any, path: str = "batch", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf, in order. A container that contains itself, or is nested too deep, is a leaf.

    ``around``: the ids of the containers that ``value`` is in.
    """
    container = _open(value, around)
    if container is None:
        yield path, value
        return
    steps, items, _ = container
    for step, item in zip(steps, items, strict=True):
        yield from walk(item, path + step, (*around, id(value)))


def _open(
    value: Any, around: tuple[int, ...]
) -> tuple[Iterable[str], Sequence[Any], Callable[[list[Any]], Any]] | None:
    """Return a container's steps of the path, its items, and what makes one of other items; None for a leaf."""
    if len(around) > _MOST_DEEP or id(value) in around:
        return None
    kind = type(value)
    if isinstance(value, Mapping):
        entries = dict(value.items())
        return (f"[{key!r}]" for key in entries), list(entries.values()), partial(_dict, list(entries))
    if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        # a named one may override __new__
        return (f".{name}" for name in kind._fields), value, lambda items: tuple.__new__(kind, items)
    if isinstance(value, (list, tuple)):
        make = kind if kind in (list, tuple) else lambda items: value
        return (f"[{index}]" for index in range(len(value))), value, make
    if kind is not SimpleNamespace and (not is_dataclass(value) or isinstance(value, type)):
        return None
    # a bundle represents a dataclass as a namespace
    names = list(vars(value)) if kind is SimpleNamespace else set_fields(value)
    return (f".{name}" for name in names), [getattr(value, name) for name in names], partial(_twin, value, names)


def _dict(keys: list[Any], items: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, items, strict=True))


def _twin(value: Any, names: list[str], items: list[Any]) -> Any:
    twin = copy.copy(value)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(twin, name, item)
    return twin


def set_fields(value: Any) -> list[str]:
    """Return the names of a dataclass's fields that have a value."""
    return [field.name for field in fields(value) if hasattr(value, field.name)]
