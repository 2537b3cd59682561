"""scripts/soak.py names what grows on a rank, and a short soak of four ranks is right and flat."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
FLAT = {"memory": 300.0, "threads": 7.0, "files": 20.0, "groups": 1.0, "hooks": 0.0, "shared memory": 0.0}
MEMORY_NOISE = (0.0, 0.7, -0.4, 0.2)


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the script as a module. The ranks are given the parent's sys.path."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("soak")


def samples(growth: dict[str, float]) -> list[Any]:
    """Return 32 samples of two ranks. ``growth`` is that of rank 1 per sample; its memory has some noise besides."""
    return [(float(i), i, [FLAT, _grown_rank(i, growth)]) for i in range(32)]


def _grown_rank(i: int, growth: dict[str, float]) -> dict[str, float]:
    rank = {what: FLAT[what] + i * growth.get(what, 0.0) for what in FLAT}
    return {**rank, "memory": rank["memory"] + MEMORY_NOISE[i % 4]}


@pytest.mark.parametrize("growth", [{}, dict.fromkeys(FLAT, -1.0)], ids=["flat", "shrinking"])
def test_flat_or_shrinking_samples_are_not_growth(soak: Any, growth: dict[str, float]) -> None:
    assert soak.grown(samples(growth), 2.0) == []


@pytest.mark.parametrize("what", FLAT)
def test_growing_resource_is_named(soak: Any, what: str) -> None:
    (message,) = soak.grown(samples({what: 0.5}), 2.0)
    assert message.startswith(f"{what} of rank 1: ")


def test_rise_during_warm_up_is_not_growth(soak: Any) -> None:
    warming = [(t, n, [FLAT, {**FLAT, "threads": 1.0}]) if n < 16 else (t, n, ranks) for t, n, ranks in samples({})]
    assert soak.grown(warming, 2.0) == []


def test_five_samples_are_too_few_for_a_verdict(soak: Any) -> None:
    assert soak.grown(samples({})[:5], 2.0) == ["5 samples are too few to say that anything is flat"]


def test_four_real_ranks_are_right_and_stay_flat(soak: Any) -> None:
    """There are enough samples for a verdict however slow the machine is, and however soon the minutes are over."""
    soaked = soak.soak(0, 4, 7, at_once=1)
    assert soaked.wrong == []
    assert len(soaked.samples) == 20
    assert soaked.done == {"reductions": 20, "windows": 20, "conflicts": 4, "groups": 3, "watched steps": 8}
    assert soak.grown(soaked.samples, 16.0) == []


def test_deliberate_leaks_on_real_ranks_are_named(soak: Any) -> None:
    leaking = soak.soak(60, 2, 7, most_rounds=16, at_once=2, leak=list(FLAT))
    assert leaking.wrong == []
    assert {message.partition(" of rank")[0] for message in soak.grown(leaking.samples, 2.0)} == set(FLAT)
