"""Labels: found where the program looped to this very tensor, and nowhere else; frames left as they were."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddpstats.guard._frames import calling_frame, label_of, site_of

T = torch.Tensor


def found(tensor: T) -> str | None:
    reached = label_of(tensor, sys._getframe(1))
    return None if reached is None else reached.path


def items(stats: dict[str, T]) -> list[str | None]:
    labels = []
    for _, value in stats.items():
        labels.append(found(value))
    return labels


def keys(stats: dict[str, T]) -> list[str | None]:
    labels = []
    for key in stats:
        labels.append(found(stats[key]))
    return labels


def values(stats: dict[str, T]) -> list[str | None]:
    return [found(value) for value in stats.values()]


def indices(stats: dict[str, T]) -> list[str | None]:
    tensors = list(stats.values())
    return [found(tensors[i]) for i in range(len(tensors))]


def nested(stats: dict[str, T]) -> list[str | None]:
    tree = {"outer": [stats]}
    labels: list[str | None] = []
    for inner in tree.values():
        for part in inner:
            for key in part:
                labels.append(found(part[key]))
    return labels


def rebound(stats: dict[str, T]) -> list[str | None]:
    def reduce(value: T) -> str | None:
        value = value.sum()
        return found(value)

    return [reduce(value) for value in stats.values()]


def of_modules(stats: dict[str, T]) -> list[str | None]:
    modules = {key: torch.nn.Linear(1, 1) for key in stats}
    labels = []
    for module in modules.values():
        labels.append(found(module.weight))
    return labels


def by_a_fixed_key(stats: dict[str, T]) -> list[str | None]:
    return [found(stats["a"]), found(stats["b"])]


def derived(stats: dict[str, T]) -> list[str | None]:
    return [found(value * 2) for value in stats.values()]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (items, ["a", "b"]),
        (keys, ["a", "b"]),
        (values, ["a", "b"]),
        (indices, ["[0]", "[1]"]),
        (nested, ["a", "b"]),
        (rebound, ["a", "b"]),
        (of_modules, [None, None]),
        (by_a_fixed_key, [None, None]),
        (derived, [None, None]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_label(program: Callable[[dict[str, T]], list[str | None]], expected: list[str | None]) -> None:
    assert program({"a": torch.ones(1), "b": torch.ones(1)}) == expected


def test_looking_keeps_nothing_alive() -> None:
    def step() -> weakref.ref[T]:
        for tensor in [torch.ones(1)]:
            found(tensor)
        alive = weakref.ref(tensor)
        del tensor
        gc.collect()
        assert alive() is None, "the frame's copy of its variables keeps a tensor alive"
        return alive

    step()


def test_a_function_that_uses_locals_is_left_alone() -> None:
    for tensor in [torch.ones(1)]:
        mine = locals()
        before = dict(mine)
        assert found(tensor) is None
        assert mine.keys() == before.keys()


def test_the_site_is_the_users_line() -> None:
    def where() -> Any:
        return site_of(calling_frame(1)[0])

    site = where()
    assert "test_frames.py" in str(site)
    assert site.source() == "return site_of(calling_frame(1)[0])"


def look_while_somebody_holds_the_variables() -> tuple[Any, bool]:
    stats, frame, found = {"loss": torch.zeros(1)}, sys._getframe(), None
    held = frame.f_locals
    for key in stats:
        found = label_of(stats[key], frame)
    return found, held["stats"] is stats


def test_variables_that_somebody_holds_stay_as_they_are() -> None:
    found, stayed = look_while_somebody_holds_the_variables()
    assert found is not None
    assert stayed


@pytest.mark.parametrize("wing", ["guard", "dump.collect._calls", "capture", "sentinel"])
def test_a_wing_that_watches_the_program_is_no_part_of_it(wing: str) -> None:
    between: dict[str, Any] = {"__name__": f"ddpstats.{wing}", "calling_frame": calling_frame}
    exec("def call(): return calling_frame(1)", between)
    frame, by_torch = between["call"]()
    assert "test_frames.py" in str(site_of(frame))
    assert not by_torch
