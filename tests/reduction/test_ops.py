"""A new marker is one `Op` and one class: it is reduced, added up in windows and sent like those of the package."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import ddpstats
from ddpstats import StatsWindow, Sum
from ddpstats._reduction.flatten import decode, flatten
from ddpstats._reduction.ops import OPS, Marker, Op
from ddpstats.errors import InvalidStats, ProtocolMismatch, SchemaConflict
from ddpstats.testing import PerRank, RankPool, ThreadGroup, run_threads
from tests.reduction.off_host import tensors_off_host

NORM = Op("test norm", finish=lambda total, weight: math.sqrt(total), prepare=lambda value: value * value)
SPREAD = Op("test largest size", finish=lambda total, weight: total, prepare=abs, elements="max", over="max")


@dataclass(frozen=True, slots=True)
class Norm(Marker):
    """Euclidean norm over elements, adds and ranks."""

    op: ClassVar[Op] = NORM


@dataclass(frozen=True, slots=True)
class LargestSize(Marker):
    """The largest absolute value."""

    op: ClassVar[Op] = SPREAD


def reduced(values: list[float]) -> tuple[Any, ...]:
    stats = {"norm": Norm(torch.tensor(values)), "size": LargestSize(values[0]), "loss": 1.0}
    result = ddpstats.reduce_stats(stats, per_rank=True)
    return result.values, result.weights["norm"], result.by_rank["norm"].values, dict(result.entries())["norm"].op


def test_marker_from_outside_is_reduced_over_ranks(two_ranks: RankPool) -> None:
    want = {"norm": 13.0, "size": 12.0, "loss": 1.0}, 2.0, (5.0, 12.0), "test norm"
    assert two_ranks.run(reduced, PerRank([[3.0, 4.0], [-12.0, 0.0]])).values() == [want, want]


@pytest.mark.parametrize("device", ["host", "device"])
def test_marker_from_outside_is_added_up_in_a_window(device: str) -> None:
    with tensors_off_host() if device == "device" else nullcontext(), StatsWindow() as window:
        for value in (3.0, -4.0, 12.0):
            window.add({"norm": Norm(torch.tensor(value)), "size": LargestSize(torch.tensor(-value))}, weight=7.0)
        flushed = window.flush()
    assert flushed.values == {"norm": 13.0, "size": 12.0}
    assert flushed.weights == {"norm": 3.0, "size": 3.0}


def test_marker_from_outside_conflicts_with_another_op() -> None:
    def call(group: ThreadGroup) -> str:
        with group.reducer(timeout_sec=30) as reducer, pytest.raises(SchemaConflict) as caught:
            reducer({"a": Norm(1.0) if group.rank else Sum(1.0)})
        return str(caught.value)

    first, second = run_threads(call, 2).values()
    assert first == second
    assert "rank 0: a leaf (sum)\n  rank 1: a leaf (test norm)" in first


@pytest.fixture
def unregistered() -> Iterator[None]:
    yield
    OPS[NORM.name] = NORM


def test_op_that_a_rank_does_not_know_is_named(unregistered: None) -> None:
    """Threads share the registry: the op is removed from it after the stats were flattened."""
    encoded = flatten({"a": Norm(1.0)}).structure.encoded
    del OPS[NORM.name]
    with pytest.raises(ProtocolMismatch, match="a leaf of op 'test norm', which this rank does not know"):
        decode(encoded)


def test_message_about_a_value_that_is_no_leaf_names_every_marker_of_the_package() -> None:
    with pytest.raises(InvalidStats) as caught:
        ddpstats.reduce_stats({"a": "3"})
    names = [marker.__name__ for marker in Marker.__subclasses__() if marker.__module__ == Marker.__module__]
    assert f"a tensor, None, or one of the markers {', '.join(dict.fromkeys(names))}\n" in str(caught.value)


def test_every_op_of_the_package_has_a_marker() -> None:
    markers = (ddpstats.Mean, Sum, ddpstats.Min, ddpstats.Max, ddpstats.Any, ddpstats.All)
    ours = {name for name in OPS if not name.startswith("test ")}
    assert ours - {marker.op.name for marker in markers} == {"none"}
