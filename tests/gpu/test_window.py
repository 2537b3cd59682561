"""A `StatsWindow` of tensors on a GPU has the same figures as on the CPU, and no `add` waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ddpstats
from ddpstats import StatsWindow
from tests.reduction.window_runs import train, training_step

pytestmark = pytest.mark.slow


def untimed(reduced: ddpstats.Reduced) -> dict[str, Any]:
    return {name: value for name, value in reduced.flat().items() if not name.startswith("time/")}


@pytest.fixture
def no_waits(gpu: None) -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("kind", ["number", "scalar", "vector"])
def test_window_of_a_training_step_has_the_figures_of_the_cpu(device: str, nonfinite: Any, kind: str) -> None:
    found = []
    for place in ("cpu", device):
        weight = {"number": 8.0, "scalar": torch.tensor(8.0, device=place), "vector": torch.ones(3, device=place)}[kind]
        with StatsWindow(nonfinite=nonfinite) as window:
            train(window, place, weight)
            found.append(untimed(window.flush()))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize("kind", ["number", "scalar"])
def test_add_waits_for_no_device(no_waits: None, kind: str) -> None:
    weight = 8.0 if kind == "number" else torch.tensor(8.0, device="cuda")
    step, window = training_step("cuda"), StatsWindow(nonfinite="skip")
    for number in range(2):  # what is set up the first time may wait
        step(window, number, weight)
    window.flush()
    torch.cuda.set_sync_debug_mode("error")
    for number in range(50):
        step(window, number, weight)
    with pytest.raises(RuntimeError, match="synchroniz"):  # the control
        float(torch.ones((), device="cuda"))
    torch.cuda.set_sync_debug_mode("default")
    reduced = window.flush()
    assert reduced.weights["tokens"] == 50.0
    assert reduced.values["time"]["step"] > 0


def test_adds_on_two_streams_in_turn_are_all_counted(gpu: None) -> None:
    other, window = torch.cuda.Stream(), StatsWindow()  # type: ignore[no-untyped-call]
    for number in range(200):
        with torch.cuda.stream(other if number % 2 else torch.cuda.current_stream()):
            window.add({f"k{i}": torch.full((), float(number), device="cuda") for i in range(20)}, weight=2)
    torch.cuda.synchronize()
    assert set(window.flush().values.values()) == {99.5}
