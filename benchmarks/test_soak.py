"""scripts/soak.py: what grows is named, and a short soak of four ranks is right and flat."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
FLAT = {"memory": 300.0, "threads": 7.0, "files": 20.0, "groups": 1.0, "hooks": 0.0, "shared memory": 0.0}


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ranks are given the parent's sys.path."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("soak")


def samples(growth: dict[str, float]) -> list[Any]:
    """Of two ranks; ``growth``: of rank 1, per sample; memory has some noise besides."""
    noise = (0.0, 0.7, -0.4, 0.2)
    return [
        (
            float(i),
            i,
            [FLAT, {what: FLAT[what] + i * growth.get(what, 0.0) for what in FLAT} | _memory(i, growth, noise)],
        )
        for i in range(32)
    ]


def _memory(i: int, growth: dict[str, float], noise: tuple[float, ...]) -> dict[str, float]:
    return {"memory": FLAT["memory"] + i * growth.get("memory", 0.0) + noise[i % 4]}


def test_what_is_flat_has_not_grown(soak: Any) -> None:
    assert soak.grown(samples({}), 2.0) == []
    assert soak.grown(samples(dict.fromkeys(FLAT, -1.0)), 2.0) == []


@pytest.mark.parametrize("what", FLAT)
def test_what_grows_is_named(soak: Any, what: str) -> None:
    (said,) = soak.grown(samples({what: 0.5}), 2.0)
    assert said.startswith(f"{what} of rank 1: ")


def test_what_rose_while_it_warmed_up_has_not_grown(soak: Any) -> None:
    found = samples({})
    assert (
        soak.grown([(t, n, [FLAT, {**FLAT, "threads": 1.0}]) if n < 16 else (t, n, h) for t, n, h in found], 2.0) == []
    )


def test_of_a_few_samples_nothing_can_be_said(soak: Any) -> None:
    assert soak.grown(samples({})[:5], 2.0) == ["5 samples are too few to say that anything is flat"]


def test_four_ranks_stay_flat_and_right(soak: Any) -> None:
    """However slow the machine is, and however soon the minutes are over: there are enough samples to tell."""
    soaked = soak.soak(0, 4, 7, at_once=1)
    assert soaked.wrong == []
    assert len(soaked.samples) == 20
    assert soaked.done == {"reductions": 20, "windows": 20, "conflicts": 4, "groups": 3, "watched steps": 8}
    assert soak.grown(soaked.samples, 16.0) == []


def test_leaks_on_purpose_are_found_on_real_ranks(soak: Any) -> None:
    leaking = soak.soak(60, 2, 7, most_rounds=16, at_once=2, leak=list(FLAT))
    assert leaking.wrong == []
    assert {said.partition(" of rank")[0] for said in soak.grown(leaking.samples, 2.0)} == set(FLAT)
