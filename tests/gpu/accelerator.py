"""The devices of this folder's tests: the CPU, the reference accelerator, and the accelerator of this machine.

Ranks share one device. NCCL refuses two ranks on one card of one host. It goes by the name that NCCL_HOSTID gives to
the host.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpstats._ranks.device import accelerator
from tests.guard import scenarios

BUSY_SEC = 1.5
BUSY_MATMULS = 60
"""Of 8000 numbers a side: some seconds on a card of a data center."""


def own_device() -> str | None:
    """Return the kind of this machine's accelerator; None where it has none, or one that has no collectives."""
    device = accelerator()
    if device is None or not torch.accelerator.is_available() or backend_of(device.type) == "gloo":
        return None
    return device.type


def register(device: str) -> None:
    """Make the device known to torch in this process; for good, so only processes that a test starts call this."""
    if device == "refdev":
        import tests.refdev.device  # noqa: F401


def backend_of(device: str) -> str:
    """Return the backend of collectives that torch takes for the device: nccl, hccl, xccl; gloo where it has none."""
    return dist.Backend.default_device_backend_map.get(device, "gloo")


def name_hosts(rank: int) -> None:
    """Let NCCL take each rank for the only one of its host; before the process group is made."""
    os.environ.update(NCCL_HOSTID=f"host of rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def join(device: str) -> None:
    """Make the default process group of this rank one of the device's backend alone."""
    register(device)
    if dist.get_backend() == backend_of(device):
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    name_hosts(rank)
    store = PrefixStore(device, dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    torch.accelerator.set_device_index(0)
    dist.init_process_group(backend_of(device), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    assert ones.item() == size


def run_joined(device: str, body: Callable[..., Any], *args: Any) -> Any:
    """Call ``body(*args)`` on this rank, whose default process group is one of the device's backend."""
    join(device)
    return body(*args)


def probe(device: str, name: str, mode: str, bad: bool) -> scenarios.Ending:
    """Play a scenario of the guard with tensors on the device."""
    join(device)
    torch.set_default_device(device)
    try:
        return scenarios.probe(name, mode, bad)
    finally:
        torch.set_default_device(None)


# -- what the host waits for ------------------------------------------------------------------------------------------


def reports_waits(device: str) -> bool:
    return device == "refdev" or hasattr(torch.get_device_module(device), "set_sync_debug_mode")


@contextlib.contextmanager
def no_waits(device: str) -> Iterator[None]:
    """Raise where the host waits for the device in the body. Of waits for an event CUDA does not report."""
    if device == "refdev":
        with _counted() as changes:
            yield
        waits = {name: changes.get(name, 0) for name in ("host_reads", "synchronizations")}
        assert waits == {"host_reads": 0, "synchronizations": 0}, "the host waited, in synchronizing calls"
        return
    with _sync_debug_mode(device, "error"):
        yield


@contextlib.contextmanager
def count_waits(device: str) -> Iterator[list[int]]:
    """Append to a list how often the host waits for the device in the body."""
    waits: list[int] = []
    if device == "cpu":
        yield waits
        waits.append(0)
    elif device == "refdev":
        with _counted() as changes:
            yield waits
        waits.append(changes.get("synchronizations", 0))
    else:
        with _sync_debug_mode(device, "warn"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield waits
        waits.append(sum("synchroniz" in str(warning.message) for warning in caught))


def is_noticed(device: str, wait: Callable[[], Any]) -> bool:
    """Return whether `no_waits` notices this wait, as it has to."""
    try:
        with no_waits(device):
            wait()
    except (RuntimeError, AssertionError) as error:
        return "synchroniz" in str(error)
    return False


def copies_to_host(device: str, body: Callable[[], Any]) -> int | None:
    """Return how many copies from the device to the host the body makes; None where torch cannot see them."""
    if device == "refdev":
        with _counted() as changes:
            body()
        return changes.get("copies_to_host", 0)
    with torch.profiler.profile() as profile:
        body()
        torch.accelerator.synchronize()
    names = [event.name.lower() for event in profile.events() if not str(event.device_type).endswith("CPU")]
    return sum("memcpy dtoh" in name for name in names) if names else None


@contextlib.contextmanager
def _sync_debug_mode(device: str, mode: str) -> Iterator[None]:
    module = torch.get_device_module(device)
    module.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        module.set_sync_debug_mode("default")


def _counted() -> contextlib.AbstractContextManager[dict[str, int]]:
    import tests.refdev.device as refdev
    from tests.refdev.runs import counted

    return counted(refdev)


def keep_busy(device: str) -> None:
    """Give the device work for some seconds. The host does not wait for it."""
    if device == "refdev":
        import tests.refdev.device as refdev

        refdev.occupy(BUSY_SEC)
    elif device != "cpu":
        matrix = torch.randn(8000, 8000, device=device)
        for _ in range(BUSY_MATMULS):
            matrix = (matrix @ matrix).clamp_(-1, 1)
