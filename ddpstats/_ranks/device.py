"""Devices of any kind that torch knows, a plugin's (PrivateUse1) too: no other file names the module of a device.

A device has a module, such as ``torch.xpu``, which need not have every function; the process has one accelerator of
torch's. Kernels and copies of a device run later, in the order of their stream, and an event says how far a stream has
come. What a device lacks (streams, events, pinned memory, a generator) is done without: then the host waits for it.
MPS has no events here, because it has never been run with them.

`torch.get_device_module` is not used: it remembers what it has found before a plugin was loaded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_WITHOUT_STREAMS = ("cpu", "meta", "mps")


def accelerator() -> torch.device | None:
    """Return torch's accelerator, without an index; None where this torch has none. Initialises nothing."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 without an accelerator
        return None


def accelerator_in_use() -> bool:
    """Return False only where no tensor can be anywhere but in host memory: then none of them need be asked."""
    device = accelerator()
    return device is not None and bool(_ask(device, "is_initialized", True))


def is_capturing() -> bool:
    """Return whether a graph of the accelerator is captured on the current stream: then it may not be read."""
    device = accelerator() if accelerator_in_use() else None
    return device is not None and bool(_ask(device, "is_current_stream_capturing", False))


def of_module(device: torch.device, name: str) -> Any:
    """Return what the device's module has under ``name``; None where it has no such thing."""
    return getattr(getattr(torch, device.type, None), name, None)


def _ask(device: torch.device, name: str, default: Any, *arguments: Any) -> Any:
    """Return what the function of the device's module returns; ``default`` where it is missing, or raises."""
    try:
        return of_module(device, name)(*arguments)
    except Exception:  # of any type, as a plugin likes
        return default


def device_kinds() -> tuple[str, ...]:
    """Return the kinds of devices on which this process may compute: "cpu", and the accelerator's."""
    device = accelerator()
    return ("cpu",) if device is None else ("cpu", device.type)


def device_name(device: torch.device) -> str:
    """Return what the maker calls the device; empty where its module does not say."""
    return str(_ask(device, "get_device_name", "", device))


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return float64; float32 on a device that does not compute in float64."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).mul(2)
    except torch.OutOfMemoryError:  # says nothing of the dtype
        raise
    except Exception:  # of any type, as a device likes
        return torch.float32
    return torch.float64


# -- streams and events -----------------------------------------------------------------------------------------------


def _current_stream(device: torch.device) -> Any:
    """Return the stream on which the program computes; None where the device has none."""
    if device.type in _WITHOUT_STREAMS:
        return None
    own = accelerator()
    is_own = own is not None and own.type == device.type
    try:
        return (torch.accelerator.current_stream if is_own else of_module(device, "current_stream"))(device)
    except Exception:
        return None


def stream_number(device: torch.device) -> int | None:
    """Return the number of the stream on which the program computes; None where the device has none."""
    number = getattr(_current_stream(device), "stream_id", None)
    return None if number is None else int(number)


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a stream for `computes_on`; None where the device has none, or is not the accelerator's."""
    if device.type in _WITHOUT_STREAMS or device.type not in device_kinds():
        return None
    try:
        return torch.Stream(device)
    except Exception:
        return None


@contextmanager
def computes_on(stream: torch.Stream) -> Iterator[None]:
    """Compute on ``stream``, which begins when the program's stream has come so far."""
    before = torch.accelerator.current_stream(stream.device), torch.accelerator.current_stream()
    stream.wait_stream(before[0])
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        for program in before:  # the second one brings the current device back
            torch.accelerator.set_stream(program)


def record_event(device: torch.device | None = None, *, timing: bool = False) -> Any:
    """Return an event at the end of what the program has given to the device.

    None where the device has no events or records a graph; without ``device`` also where no accelerator is in use.
    ``timing``: for `seconds_between`.
    """
    if device is None:
        device = accelerator() if accelerator_in_use() else None
    if device is None or device.type in _WITHOUT_STREAMS or is_capturing():
        return None
    try:
        event = torch.Event(device, enable_timing=timing)
        event.record(_current_stream(device))
        event.query()  # some devices record what cannot be asked
    except Exception:
        return None
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Wait for both events, and return the device's seconds between them; 0 where it does not count them."""
    for event in (start, end):
        if not event.query():
            event.synchronize()
    with suppress(RuntimeError):
        return float(start.elapsed_time(end)) / 1000
    return 0.0


class HostCopy:
    """A copy of a tensor in host memory, which is not waited for where the device can do without.

    The copy is in order with what the program does on the current stream before and after.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        if tensor.device.type in _WITHOUT_STREAMS:
            self._host = tensor.to("cpu", copy=True)
            return
        try:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError:  # no device here writes to the host's memory by itself
            self._host = torch.empty_like(tensor, device="cpu")
        self._host.copy_(tensor, non_blocking=True)
        self._event = record_event(tensor.device)
        if self._event is None:
            self._host = tensor.cpu()

    def is_ready(self) -> bool:
        """Return whether `wait` would return at once."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def wait(self) -> torch.Tensor:
        """Return the copy, once it is complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


# -- generators -------------------------------------------------------------------------------------------------------


def random_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's own generator; None of the CPU, and where it cannot be read and set."""
    if device.type == "cpu" or of_module(device, "set_rng_state") is None:
        return None
    state: torch.Tensor | None = _ask(device, "get_rng_state", None, *_index(device))
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set what `random_state` returned for a device of this kind."""
    of_module(device, "set_rng_state")(state, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # MPS is one device


def bytes_in(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor on the CPU, row by row, for a file or a hash."""
    tensor = tensor.contiguous()
    memory: Any = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memory
