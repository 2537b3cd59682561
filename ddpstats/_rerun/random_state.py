"""The generators of this process that a training step may draw from: taken, put back, and as plain values."""

from __future__ import annotations

import ctypes
import importlib
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

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
