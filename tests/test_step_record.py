"""The step kept for a second run: random state, batch and buffers."""

from __future__ import annotations

import collections
import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ddpstats._random_state import RandomState
from ddpstats._step_record import BufferCopies, StepRecord, walk

CPU = torch.device("cpu")


def draw(gauss: int = 1) -> list[float]:
    """From each generator; an odd number of Gaussian ones leaves another in store."""
    return [
        random.random(),
        random.gauss(0, 1),
        *numpy.random.randn(gauss).tolist(),
        float(numpy.random.rand()),
        *torch.randn(3).tolist(),
    ]


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_random_state_comes_back(before: int) -> None:
    draw(before)
    state = RandomState.take(CPU)
    first = draw()
    state.restore()
    assert draw() == first
    RandomState.from_plain(state.to_plain()).restore()
    assert draw() == first


def test_taking_it_draws_nothing() -> None:
    state = RandomState.take(CPU)
    first = draw()
    state.restore()
    for _ in range(3):
        RandomState.take(CPU)
    assert draw() == first


def test_numpy_is_asked_again_when_its_state_may_have_changed() -> None:
    numpy.random.seed(1)
    numpy.random.randn()  # one more is in store now
    stored = RandomState.take(CPU)
    numpy.random.randn()  # uses it up, without a change of the generator's words
    used = RandomState.take(CPU)
    assert stored.numpy is not None
    assert used.numpy is not None
    assert (stored.numpy["has_gauss"], used.numpy["has_gauss"]) == (1, 0)
    assert RandomState.take(CPU).numpy is used.numpy  # nothing was drawn
    numpy.random.seed(1)
    assert RandomState.take(CPU).numpy is not used.numpy


@pytest.mark.parametrize("plain", [{}, {"python": 1}, {"device": "nowhere"}])
def test_what_is_no_random_state(plain: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, IndexError, RuntimeError)):
        RandomState.from_plain(plain)


Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    x: torch.Tensor
    name: str


def test_the_batch_is_kept_by_reference_in_containers_of_its_own() -> None:
    record = StepRecord(nn.Linear(1, 1))
    x, array = torch.ones(2), numpy.ones(2)
    batch = {"x": x, "pair": Pair(x, [x]), "sample": Sample(x, "a"), "array": array}
    kept = record.begin(batch)
    batch.clear()
    array[0] = 5
    record.end()
    assert [path for path, _ in walk(kept.batch)] == [
        "batch['x']",
        "batch['pair'][0]",
        "batch['pair'][1][0]",
        "batch['sample'].x",
        "batch['sample'].name",
        "batch['array']",
    ]
    assert kept.batch["x"] is x
    assert type(kept.batch["pair"]) is Pair
    assert kept.batch["sample"].x is x
    assert kept.batch["array"].tolist() == [1, 1]
    assert not record.copies


def test_a_change_in_place_is_found_and_later_batches_are_copied() -> None:
    record = StepRecord(nn.Linear(1, 1))
    x = torch.ones(2)
    kept = record.begin({"x": [x]})
    x.add_(1)
    record.end()
    assert kept.changed == ("batch['x'][0]",)
    record.clear()
    later = record.begin({"x": [x]})
    x.add_(1)
    record.end()
    assert later.changed == ()
    assert later.batch["x"][0].tolist() == [2, 2]


def test_inference_tensors_are_copied() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    record = StepRecord(nn.Linear(1, 1))
    kept = record.begin(x)
    record.end()
    assert kept.batch is not x


def test_buffers_are_those_before_the_first_forward_pass_of_the_step() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    record = StepRecord(model)
    for step in range(3):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for _ in range(2):
            record.begin(None)
            model(torch.randn(4, 2) * step)
            record.end()
        assert record.buffers is not None
        assert record.buffers.keys() == before.keys()
        assert all(torch.equal(before[name], record.buffers[name]) for name in before)
        assert not torch.equal(before["0.num_batches_tracked"], model[0].num_batches_tracked)  # type: ignore[arg-type]
        record.clear()
    record.close()
    assert len(model._forward_pre_hooks) == 0


def test_buffers_that_come_go_and_are_replaced() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    copies = BufferCopies(model)
    first = copies.take()
    assert "0.running_mean" in first
    model[0].running_mean = torch.full((2,), 7.0)
    assert copies.take()["0.running_mean"].tolist() == [7, 7]
    model[0].register_buffer("extra", torch.ones(1))
    assert copies.take()["0.extra"].tolist() == [1]
    model.append(nn.BatchNorm1d(3))
    assert "1.running_var" in copies.take()
    del model[0].extra
    assert "0.extra" not in copies.take()
    copies.close()


def test_autocast_is_noted_where_the_module_is_called() -> None:
    model = nn.Linear(1, 1)
    record = StepRecord(model)
    kept = record.begin(None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(1))
    record.end()
    assert kept.autocast == ("cpu", True, torch.bfloat16)


def test_no_thread_is_started() -> None:
    before = threading.active_count()
    record = StepRecord(nn.Linear(1, 1))
    record.begin(None)
    record.end()
    assert threading.active_count() == before
