"""The tests of this folder run on the CPU, on the reference accelerator, and on this machine's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddpstats.testing import RankPool
from tests.gpu import accelerator
from tests.refdev.conftest import refdev as refdev

REASON = "needs a GPU that torch can use: run `scripts/launch.sh test --nightly tests/gpu` on a machine that has one"
OWN = accelerator.own_device() or "cuda"


@pytest.fixture(params=["cpu", "refdev", OWN])
def device(request: pytest.FixtureRequest) -> str:
    """The same body on all: what fails on one device alone is the device's."""
    return _require(request)


@pytest.fixture(params=["refdev", OWN])
def gpu(request: pytest.FixtureRequest) -> str:
    """For what says nothing on a CPU."""
    return _require(request)


@pytest.fixture
def gpu_that_reports_waits(gpu: str) -> str:
    if not accelerator.reports_waits(gpu):
        pytest.skip(f"torch does not report what waits for the device {gpu}")
    return gpu


def _require(request: pytest.FixtureRequest) -> str:
    if request.param == "refdev":
        request.getfixturevalue("refdev")
    elif request.param != "cpu" and accelerator.own_device() is None:
        pytest.skip(REASON)
    return str(request.param)


class Ranks:
    """Ranks whose default process group is one of a device's backend, by the device and their number."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], RankPool] = {}

    def of(self, device: str, number: int) -> RankPool:
        key = device, number
        if key not in self._pools:
            self._pools[key] = RankPool(number, timeout_sec=60)
        return self._pools[key]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with contextlib.closing(Ranks()) as ranks:
        yield ranks


@pytest.fixture
def on_rank(ranks: Ranks) -> Callable[..., Any]:
    """Call ``body(device, *args)`` in a process that may use the device, and return what it returns."""

    def run(body: Callable[..., Any], device: str, *args: Any) -> Any:
        return ranks.of(device, 1).run(accelerator.run_joined, device, body, device, *args).values()[0]

    return run


@pytest.fixture
def on_ranks(ranks: Ranks) -> Callable[..., Any]:
    """Call ``body(device, *args)`` on two ranks that share the device, and return what both return."""

    def run(body: Callable[..., Any], device: str, *args: Any) -> Any:
        first, second = ranks.of(device, 2).run(accelerator.run_joined, device, body, device, *args).values()
        assert first == second
        return first

    return run
