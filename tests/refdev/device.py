"""Register the reference accelerator in this process: the device "refdev", and the collectives "refccl".

Importing this module registers both, once a process and for good, so only processes that a test starts import it.
"""

from __future__ import annotations

import atexit
import importlib.util
import sys
import types
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.utils import backend_registration

from .build import built


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("refdev_native", built())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native = _load()

SHUTDOWN_SEC = 5.0
INNER_TIMEOUT = timedelta(hours=1)
"""How long gloo waits below refccl, which itself waits as long as the watchdog lets it."""


_COUNTERS = ("launches", "host_reads", "copies_to_host", "copies_to_device", "synchronizations", "allocations")


def counters() -> dict[str, int]:
    """Return what the driver counted so far, by name."""
    return dict(zip(_COUNTERS, native.counters(), strict=True))


def occupy(seconds: float) -> None:
    """Queue a kernel on the current stream that takes this long, or until `release`."""
    native.occupy(seconds)


def release() -> None:
    """Let the kernels end that `occupy` has queued so far."""
    native.release()


class _CurrentDevice:
    """The context `torch.get_device_module("refdev").device(index)`: the index is the current device in it."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.previous = native.exchange_device(self.index)

    def __exit__(self, *exception: object) -> None:
        native.exchange_device(self.previous)


def _index(device: int | str | torch.device) -> int:
    index: int | None = device if isinstance(device, int) else torch.device(device).index
    return int(native.current_device()) if index is None or index < 0 else index


def _device_module() -> types.ModuleType:
    """Make the module torch.refdev, with what torch, FSDP2 and GradScaler ask of a device's module."""
    module = types.ModuleType("torch.refdev")

    def manual_seed_all(seed: int) -> None:
        for index in range(native.device_count()):
            native.manual_seed(index, seed)

    def set_device(device: Any) -> None:
        native.exchange_device(_index(device))

    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(torch.device("refdev", _index(device if device is not None else -1)))

    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=native.device_count,
        current_device=native.current_device,
        set_device=set_device,
        device=_CurrentDevice,
        synchronize=lambda device=-1: native.synchronize(_index(device)),
        current_stream=current_stream,
        stream=lambda stream: stream,
        Stream=lambda device=None, priority=0: torch.Stream(device=device or "refdev", priority=priority),
        Event=lambda enable_timing=False, **_: torch.Event(device="refdev", enable_timing=enable_timing),
        get_device_name=lambda device=None: "reference accelerator",
        get_device_capability=lambda device=None: (0, 0),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda: True,
        manual_seed=lambda seed: native.manual_seed(native.current_device(), seed),
        manual_seed_all=manual_seed_all,
        get_rng_state=lambda device=-1: native.get_rng_state(_index(device)),
        set_rng_state=lambda state, device=-1: native.set_rng_state(_index(device), state),
        memory_allocated=lambda device=-1: native.memory_allocated(_index(device)),
    )
    return module


def _create_group(options: Any, backend_options: Any = None) -> Any:
    """Make the process group's backend of one rank; torch calls it with the store, the rank and the timeout."""
    store = PrefixStore("gloo below refccl", options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=INNER_TIMEOUT)
    return native.RefBackend(gloo, options.group_rank, options.group_size, options.timeout.total_seconds())


def _register() -> None:
    backend_registration.rename_privateuse1_backend("refdev")
    native.register_device()
    module = _device_module()
    torch._register_device_module("refdev", module)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    sys.modules["torch.refdev"] = module
    dist.Backend.register_backend("refccl", _create_group, extended_api=True, devices=["refdev"])
    atexit.register(native.shutdown, SHUTDOWN_SEC)


_register()
