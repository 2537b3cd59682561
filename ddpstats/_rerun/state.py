"""Where a module in use is; and its buffers and plain attributes: set for a step that is run again, then put back."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddpstats._observe.torch_compat import buffers_of


def device_of(module: nn.Module) -> torch.device:
    """Where its first parameter is; the CPU where it has none."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def place_text(module: nn.Module) -> str:
    """Host, process and device, for whoever has to go there."""
    device = device_of(module)
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"host {socket.gethostname()}, process {os.getpid()}, device {device}{name}"


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Buffers and plain attributes are afterwards as they are now."""
    owners = [(buffers_of(one), dict(buffers_of(one))) for one in module.modules()]
    buffers = {id(buffer): buffer for _, kept in owners for buffer in kept.values() if buffer is not None}
    values = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    attributes = [(one, _plain_attributes(one), set(vars(one))) for one in module.modules()]
    try:
        yield
    finally:
        _put_buffers_back(owners, values)
        for one, kept, names in attributes:
            _put_attributes_back(vars(one), kept, names)


def buffer_places(module: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor, str]]:
    """(owner's buffers, key, buffer, name); one that several modules share has one name, as in ``named_buffers``."""
    names: dict[int, str] = {}
    for prefix, owner in module.named_modules():
        for key, buffer in list(buffers_of(owner).items()):
            if buffer is not None:
                name = names.setdefault(id(buffer), f"{prefix}.{key}" if prefix else key)
                yield buffers_of(owner), key, buffer, name


def _put_buffers_back(
    owners: Sequence[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]], values: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """``owners``: a module's buffers, and which they were; ``values``: buffers, and what they held."""
    for owner, kept in owners:
        if list(owner) != list(kept) or any(owner[key] is not buffer for key, buffer in kept.items()):
            owner.clear()
            owner.update(kept)
    with torch.no_grad():
        for buffer, value in values:
            if buffer.shape == value.shape:
                buffer.copy_(value)
            else:  # resized in place
                buffer.data = value


def set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """In place, but where the step has put a tensor of another shape or dtype there: by a new one."""
    made: dict[str, Tensor] = {}
    with torch.no_grad():
        for owner, key, buffer, name in list(buffer_places(module)):
            value = values.get(name)
            if value is None:
                continue
            if (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                buffer.copy_(value)
            else:
                owner[key] = made.setdefault(name, value.to(buffer.device, copy=True))


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


_MT19937_WORDS = 624  # numpy's, of 32 bits
_MT19937_BYTES = 4 * _MT19937_WORDS + 4  # and a position


@dataclass(frozen=True)
class RandomState:
    """The generators of this process that a step may draw from: python, numpy, torch's on the CPU, and one device's."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch_cpu: torch.Tensor
    device: torch.device
    torch_device: torch.Tensor | None

    @classmethod
    def take(cls, device: torch.device) -> RandomState:
        """Of now. Local; draws nothing. ``device``: where the module is; its generator, and no other device's."""
        there = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(random.getstate(), _numpy.take(), torch.get_rng_state(), device, there)

    def restore(self) -> None:
        """Set the generators. A device's generator is left where that kind of device is not the module's."""
        random.setstate(self.python)
        numpy = None if self.numpy is None else numpy_or_none()
        if numpy is not None:
            numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.torch_device, self.device)

    def to_plain(self) -> dict[str, Any]:
        """As tensors, lists and numbers."""
        version, words, gauss = self.python
        plain: dict[str, Any] = {
            "python": {"version": version, "words": list(words), "gauss": gauss},
            "torch_cpu": self.torch_cpu,
            "torch_device": self.torch_device,
            "device": str(self.device),
            "numpy": None,
        }
        if self.numpy is not None and self.numpy["bit_generator"] == "MT19937":
            kept = {name: self.numpy[name] for name in ("has_gauss", "gauss")}
            key, pos = self.numpy["state"]["key"], self.numpy["state"]["pos"]
            # as a list: torch may have been built for another numpy, and not be able to read an array
            words = torch.tensor(key.tolist(), dtype=torch.int64, device="cpu")
            plain["numpy"] = {**kept, "key": words, "pos": int(pos)}
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any], device: torch.device | None = None) -> RandomState:
        """What `to_plain` wrote; for ``device`` instead of the one it was taken on.

        A generator's state fits one kind of device only: on another kind it is left out. So is numpy's where numpy is
        not installed: nothing can draw from it there.

        Raises ValueError, TypeError, KeyError or IndexError for anything else.
        """
        there = torch.device(plain["device"])
        here = there if device is None else device
        python = plain["python"]
        state = None if plain["numpy"] is None else _numpy_state(plain["numpy"])
        words = tuple(int(word) for word in python["words"])
        return cls(
            (int(python["version"]), words, python["gauss"]),
            state,
            plain["torch_cpu"],
            here,
            plain["torch_device"] if here.type == there.type else None,
        )


def numpy_or_none() -> Any:
    """None where it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def _numpy_state(found: dict[str, Any]) -> dict[str, Any] | None:
    """As numpy takes it. Raises ValueError and the like for what is none."""
    key, numpy = found["key"], numpy_or_none()
    if key.shape != (_MT19937_WORDS,):
        raise ValueError(f"{_MT19937_WORDS} words should stand here, not {tuple(key.shape)}")
    if numpy is None:
        return None
    return {
        "bit_generator": "MT19937",
        "state": {"key": numpy.array(key.tolist(), dtype="uint32"), "pos": int(found["pos"])},
        "has_gauss": int(found["has_gauss"]),
        "gauss": float(found["gauss"]),
    }


class _NumpyState:
    """The state of numpy's global generator; asking for it costs 130 us, so it is asked only if it may be another.

    While the generator's words and position stay the same, all that can change is whether a second Gaussian number is
    in store, and only from yes to no.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._address: int | None = None
        self._seen = b""
        self._state: dict[str, Any] = {}

    def take(self) -> dict[str, Any] | None:
        numpy = sys.modules.get("numpy.random")  # a program that has not loaded it has not drawn from it
        if numpy is None:
            return None
        generator = getattr(numpy.mtrand._rand, "_bit_generator", None)
        if (
            generator is self._generator
            and self._address is not None
            and self._state["has_gauss"] == 0
            and ctypes.string_at(self._address, _MT19937_BYTES) == self._seen
        ):
            return self._state
        self._state = numpy.get_state(legacy=False)
        self._generator = generator
        self._address = _address_of(generator, self._state)
        if self._address is not None:
            self._seen = ctypes.string_at(self._address, _MT19937_BYTES)
        return self._state


def _address_of(generator: Any, state: dict[str, Any]) -> int | None:
    """Where the generator keeps its words and position, one after the other; None where it does not."""
    if state["bit_generator"] != "MT19937" or type(generator).__name__ != "MT19937":
        return None
    address: int = generator.ctypes.state_address
    words, pos = state["state"]["key"].tobytes(), state["state"]["pos"]
    expected = words + int(pos).to_bytes(4, sys.byteorder, signed=True)
    return address if ctypes.string_at(address, _MT19937_BYTES) == expected else None


_numpy = _NumpyState()


FLOAT_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


class Autocast(NamedTuple):
    """As it was when a module's forward pass began."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    def to_plain(self) -> dict[str, Any]:
        return {"device_type": self.device_type, "enabled": self.enabled, "dtype": str(self.dtype)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Autocast:
        """What `to_plain` made."""
        return cls(plain["device_type"], plain["enabled"], FLOAT_DTYPES[plain["dtype"]])


@contextlib.contextmanager
def as_in(environment: Mapping[str, Any]) -> Iterator[None]:
    """Switches that change the last bits; those that the capture does not know stay as they are."""
    before = switches()
    wanted = {name: environment[name] for name in before if type(environment.get(name)) is type(before[name])}
    try:
        _switch(wanted)
        yield
    finally:
        _switch(before)


def switches() -> dict[str, Any]:
    """As they are now, as plain values by name; without those that torch does not tell."""
    found = {
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "default_dtype": str(torch.get_default_dtype()),
    }
    with contextlib.suppress(RuntimeError):  # where precision was set by backend, in torch's newer way
        found["matmul_precision"] = torch.get_float32_matmul_precision()
    return found


def _switch(values: Mapping[str, Any]) -> None:
    """Only what is not so already: ``torch.use_deterministic_algorithms`` imports torch's compiler, in seconds."""
    now = switches()
    for name, value in values.items():
        if name in now and value != now[name]:
            _set(name, value)


def _set(name: str, value: Any) -> None:
    if name == "threads" and 1 <= value <= 1024:
        torch.set_num_threads(value)
    elif name == "deterministic_algorithms":
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(value, warn_only=warn_only)
    elif name == "cudnn_deterministic":
        torch.backends.cudnn.deterministic = value
    elif name == "cudnn_benchmark":
        torch.backends.cudnn.benchmark = value
    elif name == "matmul_precision" and value in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(value)
    elif name == "default_dtype" and value in FLOAT_DTYPES:
        torch.set_default_dtype(FLOAT_DTYPES[value])
