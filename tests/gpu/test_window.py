"""A `StatsWindow` of tensors on a device has the same figures as on the CPU, and no `add` waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import device_runs as runs

pytestmark = pytest.mark.slow
Run = Callable[..., Any]


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("kind", ["number", "scalar", "vector"])
def test_window_of_a_training_step_has_the_figures_of_the_cpu(
    on_rank: Run, device: str, nonfinite: str, kind: str
) -> None:
    of_the_cpu, of_the_device = on_rank(runs.windows, device, nonfinite, kind)
    assert of_the_cpu == pytest.approx(of_the_device, rel=1e-3)


@pytest.mark.parametrize("kind", ["number", "scalar"])
def test_add_waits_for_no_device(on_rank: Run, gpu_that_reports_waits: str, kind: str) -> None:
    is_noticed, tokens, seconds = on_rank(runs.adds_without_waiting, gpu_that_reports_waits, kind)
    assert is_noticed  # a wait, where there is one
    assert tokens == 50.0
    assert seconds > 0


def test_adds_on_two_streams_in_turn_are_all_counted(on_rank: Run, gpu: str) -> None:
    assert on_rank(runs.adds_on_two_streams, gpu) == {99.5}
