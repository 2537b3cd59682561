"""A step is kept for a second run: its random state, batch and buffers. The caller's objects stay as they are."""

from __future__ import annotations

import collections
import copy
import io
import pickle
import random
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ddpstats._rerun.codec import CannotStore, to_plain
from ddpstats._rerun.record import BufferCopies, StepRecord, StepWatch, walk
from ddpstats._rerun.state import RandomState

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


Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    x: torch.Tensor
    name: str


def test_the_batch_is_kept_by_reference_in_containers_of_its_own() -> None:
    record = StepRecord(nn.Linear(1, 1))
    x, array = torch.ones(2), numpy.ones(2)
    names = {"a"}
    batch = {"x": x, "pair": Pair(x, [x]), "sample": Sample(x, "a"), "array": array, "names": names}
    kept = record.begin(batch)
    batch.clear()
    array[0] = 5
    record.end()
    assert [path for path, _ in walk(kept.batch)] == [
        "batch['x']",
        "batch['pair'].left",
        "batch['pair'].right[0]",
        "batch['sample'].x",
        "batch['sample'].name",
        "batch['array']",
        "batch['names']",
    ]
    assert kept.batch["x"] is x
    assert kept.batch["names"] is names  # of a type that is not known: the caller's own object
    assert type(kept.batch["pair"]) is Pair
    assert kept.batch["sample"].x is x
    assert kept.batch["array"].tolist() == [1, 1]
    assert not record.copies


def test_walk_enters_the_namespace_that_represents_a_dataclass() -> None:
    assert list(walk([types.SimpleNamespace(x=1, y=[2])])) == [("batch[0].x", 1), ("batch[0].y[0]", 2)]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("make", [collections.UserDict, types.MappingProxyType, collections.OrderedDict])
def test_a_mapping_of_the_callers_stays_as_it_is(make: Callable[[Any], Any], copies: bool) -> None:
    record = StepRecord(nn.Linear(1, 1))
    record.copies = copies
    items = {"x": torch.ones(2, requires_grad=True) * 2, "array": numpy.ones(2), "inner": {"a": 1}}
    batch = make(items)
    kept: Any = record.begin(batch).batch
    assert (kept["x"] is items["x"]) is not copies
    assert kept["array"] is not items["array"]
    assert kept["inner"] is not items["inner"]
    assert all(batch[key] is value for key, value in items.items())
    kept["more"] = 1
    assert "more" not in batch


@dataclass
class Unset:
    x: torch.Tensor
    cache: object = field(init=False)


class Picky(collections.namedtuple("Picky", "x y")):
    def __new__(cls, x: Any) -> Picky:
        return super().__new__(cls, x, 2)


class Rows(list):  # type: ignore[type-arg]
    pass


def test_legal_batches_of_odd_classes() -> None:
    record = StepRecord(nn.Linear(1, 1))
    x, rows = torch.ones(2), Rows([torch.ones(1)])
    kept = record.begin([Unset(x), Picky(x), rows, torch.Size([2])])
    assert [path for path, _ in walk(kept.batch)] == [
        *("batch[0].x", "batch[1].x", "batch[1].y", "batch[2][0]", "batch[3][0]"),
    ]
    assert kept.batch[0].x is x
    assert type(kept.batch[1]) is Picky
    assert kept.batch[1].x is x
    assert kept.batch[2] is rows  # which a bundle refuses by its name
    rows[0].add_(1)
    record.end()
    assert kept.changed == ("batch[2][0]",)


def test_batches_that_hold_themselves_are_kept_and_cannot_be_stored() -> None:
    record = StepRecord(nn.Linear(1, 1))
    endless: dict[str, Any] = {"x": torch.ones(1)}
    endless["again"], endless["twice"] = endless, [endless]
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for batch in (endless, deep):
        kept = record.begin(batch)
        assert len(list(walk(kept.batch))) < 20
        with pytest.raises(CannotStore):
            to_plain(kept.batch)
        record.end()


def test_a_module_is_saved_and_copied_while_it_is_recorded() -> None:
    """The copy's hook does nothing, also where ddpstats is not installed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    record = StepRecord(model)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"ddpstats" not in file.getvalue()
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    kept = record.begin(None)
    for twin in (saved, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            twin.eval()(torch.ones(2, 2))
        assert len(twin._forward_pre_hooks) == 1
        assert kept.autocast is None
        assert record.buffers is None
    model(torch.ones(2, 2))
    assert kept.autocast is not None
    record.close()


def test_a_buffer_that_two_modules_share_has_one_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared = torch.ones(2)
    for module in model:
        module.register_buffer("mask", shared)
    copies = BufferCopies(model)
    assert list(copies.take()) == [name for name, _ in model.named_buffers()] == ["0.mask"]
    model[1]._buffers["mask"] = torch.zeros(2)  # as Module.to does
    assert list(copies.take()) == ["0.mask", "1.mask"]


def test_inference_tensors_are_copied() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    record = StepRecord(nn.Linear(1, 1))
    kept = record.begin(x)
    record.end()
    assert kept.batch is not x


def test_buffers_are_those_before_the_first_micro_batch_that_is_a_part_of_the_step() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    record = StepRecord(model)
    for is_dropped in (True, True, False, True, False):
        record.begin(None)
        model(torch.randn(4, 2))
        record.end()
        if is_dropped:  # an exception left it
            record.drop_last()
    assert record.buffers is not None
    assert record.buffers["0.num_batches_tracked"] == 2
    assert len(record.micro_batches) == 2
    record.close()


def test_a_step_waits_for_all_devices_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device that is done does not show that another one is."""
    done, waits = {"cpu": True, "meta": False}, list[bool]()

    def wait_until(is_done: Callable[[], bool], what: str, timeout_sec: float) -> None:
        waits.append(is_done())
        done["meta"] = True
        waits.append(is_done())

    def event_of(device: torch.device) -> Any:
        return types.SimpleNamespace(query=lambda: done[device.type])

    watch = StepWatch("NaNCapture.check", None)
    monkeypatch.setattr("ddpstats._rerun.record.record_event", event_of)
    monkeypatch.setattr("ddpstats._rerun.record.channel_of", lambda _: types.SimpleNamespace(wait_until=wait_until))
    watch._wait_for_devices([torch.device("cpu"), torch.device("cpu"), torch.device("meta")])
    assert waits == [False, True]


def test_buffers_that_come_go_and_are_replaced() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    copies = BufferCopies(model)
    first = copies.take()
    assert "0.running_mean" in first
    model[0].running_mean = torch.full((2,), 7.0)
    assert copies.take()["0.running_mean"].tolist() == [7, 7]
    model[0].register_buffer("extra", torch.ones(1))
    assert copies.take()["0.extra"].tolist() == [1]
    del model[0].extra
    assert "0.extra" not in copies.take()
