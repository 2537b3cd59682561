"""The state that a step depends on beside parameters and batch: buffers, attributes, generators, torch's switches.

Each is taken with the step, set while the step is run again, and put back afterwards.
"""

from __future__ import annotations

import importlib
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddpstats._observe.torch_compat import buffers_of
from ddpstats._ranks.device import device_name, random_state, set_random_state

# -- the module -------------------------------------------------------------------------------------------------------


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter; the CPU for a module without any."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def place_text(module: nn.Module) -> str:
    """Return host, process and device in words."""
    device = device_of(module)
    name = device_name(device)
    return f"host {socket.gethostname()}, process {os.getpid()}, device {device}{name and f' ({name})'}"


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Put the module's buffers (the very tensors, and their values) and plain attributes back at the end."""
    modules = list(module.modules())
    owners = [(buffers_of(owner), dict(buffers_of(owner))) for owner in modules]
    buffers = {id(buffer): buffer for _, kept in owners for buffer in kept.values() if buffer is not None}
    values = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    attributes = [(vars(owner), _plain_attributes(owner), set(vars(owner))) for owner in modules]
    try:
        yield
    finally:
        for owner, kept in owners:
            if list(owner) != list(kept) or any(owner[key] is not buffer for key, buffer in kept.items()):
                owner.clear()
                owner.update(kept)
        for buffer, value in values:
            _fill(buffer, value)
        for current, plain, names in attributes:
            for name in [name for name in current if name not in names]:
                del current[name]
            current.update(plain)


def _fill(buffer: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if buffer.shape == value.shape:
            buffer.copy_(value)
        else:  # it was resized in place
            buffer.data = value


def _named_buffers(module: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor, str]]:
    """Yield (owner's buffers, key, buffer, name); a shared buffer has one name, as in ``named_buffers``."""
    names: dict[int, str] = {}
    for prefix, owner in module.named_modules():
        for key, buffer in list(buffers_of(owner).items()):
            if buffer is not None:
                name = names.setdefault(id(buffer), f"{prefix}.{key}" if prefix else key)
                yield buffers_of(owner), key, buffer, name


def set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Fill the buffers in place; replace one whose shape or dtype is not that of its value."""
    replaced: dict[str, Tensor] = {}
    with torch.no_grad():
        for owner, key, buffer, name in list(_named_buffers(module)):
            value = values.get(name)
            if value is None:
                continue
            if (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                buffer.copy_(value)
            else:
                owner[key] = replaced.setdefault(name, value.to(buffer.device, copy=True))


_PLAIN = frozenset({int, float, bool, str, type(None)})


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


# -- generators -------------------------------------------------------------------------------------------------------

_MT19937_WORDS = 624  # numpy's, of 32 bits


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
        """Return the current state. Local; draws nothing. ``device``: the module's; no other device's is taken."""
        numpy = sys.modules.get("numpy.random")  # a program that has not loaded it has not drawn from it
        numpy_state = None if numpy is None else numpy.get_state(legacy=False)
        return cls(random.getstate(), numpy_state, torch.get_rng_state(), device, random_state(device))

    def restore(self) -> None:
        """Set the generators. A device's generator is left where that kind of device is not the module's."""
        random.setstate(self.python)
        numpy = None if self.numpy is None else numpy_or_none()
        if numpy is not None:
            numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_device is not None:
            set_random_state(self.device, self.torch_device)

    def to_plain(self) -> dict[str, Any]:
        """Return the state as tensors, lists and numbers."""
        version, words, gauss = self.python
        numpy = None
        if self.numpy is not None and self.numpy["bit_generator"] == "MT19937":
            state = self.numpy["state"]
            numpy = {**self.numpy, "state": {"key": state["key"].tolist(), "pos": int(state["pos"])}}
        return {
            "python": {"version": version, "words": list(words), "gauss": gauss},
            "numpy": numpy,
            "torch_cpu": self.torch_cpu,
            "torch_device": self.torch_device,
            "device": str(self.device),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any], device: torch.device | None = None) -> RandomState:
        """Read what `to_plain` wrote; for ``device`` instead of the one it was taken on.

        A generator's state fits one kind of device only: on another kind it is left out. So is numpy's where numpy is
        not installed: nothing can draw from it there.

        Raises ValueError, TypeError, KeyError or IndexError for any other value.
        """
        taken_on = str(plain["device"])  # of a kind that this torch need not know
        device = torch.device(taken_on) if device is None else device
        python, numpy = plain["python"], plain["numpy"]
        if numpy is not None and not 0 <= numpy["state"]["pos"] <= len(numpy["state"]["key"]) == _MT19937_WORDS:
            raise ValueError("numpy's generator has no such state")  # and would read beyond its memory
        return cls(
            (int(python["version"]), tuple(int(word) for word in python["words"]), python["gauss"]),
            numpy,
            plain["torch_cpu"],
            device,
            plain["torch_device"] if device.type == taken_on.partition(":")[0] else None,
        )


def numpy_or_none() -> Any:
    """Return numpy; None where it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


# -- switches ---------------------------------------------------------------------------------------------------------

FLOAT_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


class Autocast(NamedTuple):
    """The autocast settings of a forward pass."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


def _set_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: bool(getattr(owner, name)), lambda value: setattr(owner, name, value)


_cuda, _cudnn, _mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "threads": (torch.get_num_threads, lambda value: torch.set_num_threads(min(max(value, 1), 1024))),
    "deterministic_algorithms": (torch.are_deterministic_algorithms_enabled, _set_deterministic),
    "default_dtype": (
        lambda: str(torch.get_default_dtype()),
        lambda value: torch.set_default_dtype(FLOAT_DTYPES.get(value, torch.get_default_dtype())),
    ),
    "matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn_enabled": _attribute(_cudnn, "enabled"),
    "cudnn_deterministic": _attribute(_cudnn, "deterministic"),
    "cudnn_benchmark": _attribute(_cudnn, "benchmark"),
    "cudnn_allow_tf32": _attribute(_cudnn, "allow_tf32"),
    "fp16_reduced_precision_reduction": _attribute(_cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "bf16_reduced_precision_reduction": _attribute(_cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    "fp16_accumulation": _attribute(_cuda.matmul, "allow_fp16_accumulation"),
    "mkldnn_enabled": _attribute(_mkldnn, "enabled"),
    "mkldnn_deterministic": _attribute(_mkldnn, "deterministic"),
    "sdpa_flash": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "sdpa_mem_efficient": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "sdpa_math": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "sdpa_cudnn": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "sdpa_math_reduced_precision": (
        lambda: _cuda.fp16_bf16_reduction_math_sdp_allowed(),  # type: ignore[no-untyped-call]
        lambda value: _cuda.allow_fp16_bf16_reduction_math_sdp(value),
    ),
    "attention_fastpath": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "fill_uninitialized_memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
}


def switches() -> dict[str, Any]:
    """Return torch's switches that change a result or its last bits; without those that torch cannot read."""
    values = {}
    for name, (read, _) in _SWITCHES.items():
        # A torch that lacks it; where precision was set by backend, in torch's newer way.
        with suppress(AttributeError, RuntimeError):
            values[name] = read()
    return values


@contextmanager
def as_in(environment: Mapping[str, Any]) -> Iterator[None]:
    """Set the switches as they were in the step; those that ``environment`` lacks stay as they are."""
    before = switches()
    try:
        _set_switches({name: environment[name] for name in before if type(environment.get(name)) is type(before[name])})
        yield
    finally:
        _set_switches(before)


def _set_switches(values: Mapping[str, Any]) -> None:
    """Set what differs from now: ``torch.use_deterministic_algorithms`` imports torch's compiler, in seconds."""
    now = switches()
    for name, value in values.items():
        if name in now and value != now[name]:
            _SWITCHES[name][1](value)
