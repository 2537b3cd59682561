"""Settings of torch that change a result, or its last bits: taken with a step, and set while it is run again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

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
