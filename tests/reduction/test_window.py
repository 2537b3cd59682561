"""A `StatsWindow` gives what one reduction of all its adds would give; an add is local and waits for no device."""

from __future__ import annotations

import gc
import math
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import ddpstats
from ddpstats import All, Any as AnyFlag, Max, Mean, Min, StatsWindow, Sum
from ddpstats._reduction import read, window as window_module
from ddpstats.errors import ConfigError, InvalidStats, SchemaConflict
from ddpstats.testing import RankPool
from tests import programs
from tests.reduction import window_runs as runs
from tests.reduction.off_host import tensors_off_host
from tests.reduction.shapes import Point
from tests.reduction.window_pairs import Draw, check, flushed

t = torch.tensor


def flush_of(*adds: Any, weight: Any = 1.0, **settings: Any) -> ddpstats.Reduced:
    with StatsWindow(**settings) as window:
        for stats in adds:
            window.add(stats, weight)
        return window.flush()


def values(*adds: Any, **settings: Any) -> Any:
    return flush_of(*adds, **settings).values


def alike(outcomes: Any) -> Any:
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


@pytest.fixture
def as_if_on_a_device() -> Iterator[None]:
    """Every tensor takes the way of one on an accelerator."""
    with tensors_off_host():
        yield


# -- against the oracle -----------------------------------------------------------------------------------------------


def test_alone_as_if_on_a_device(as_if_on_a_device: None) -> None:
    pairs = 0
    for seed in range(150):
        policy, by_rank = Draw(seed, tensors=0.9).window(1)
        check(by_rank, [flushed(by_rank[0], policy)], policy)
        pairs += len(by_rank[0])
    assert pairs > 600


# -- keys and structures come and go ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adds", "want"),
    [
        ([{"a": Point(1.0, 2.0)}, {"a": Point(3.0, None)}], {"a": {"x": 2.0, "y": 2.0}}),
        ([{}, None], None),
        ([[1.0], [2.0, 4.0]], [1.5, 4.0]),
        ([{"a": Max(t([1.0, 7.0]))}, {"a": Max(-2)}], {"a": 7.0}),
        ([{"a": np.float32(1.5)}, {"a": None}, {"a": np.array([2.5])}], {"a": 2.0}),
    ],
)
def test_from_add_to_add(adds: list[Any], want: Any) -> None:
    assert repr(values(*adds)) == repr(want)


def test_other_stats_after_a_flush() -> None:
    with StatsWindow() as window:
        window.add({"a": 1.0})
        assert window.flush().values == {"a": 1.0}
        window.add({"a": Sum(1.0)})
        assert window.flush().values == {"a": 1.0}
        assert window.flush().values == {}


# -- values that are hard to add up -----------------------------------------------------------------------------------


def test_sums_of_the_largest_values_do_not_overflow() -> None:
    adds = [{"a": 1e200}, {"a": 1e200}, {"a": -1e200}, {"a": -1e200}]
    assert values(*adds, weight=1e100) == {"a": 0.0}


@pytest.mark.parametrize("device", ["host", "device"])
def test_flags_and_weights_that_are_none(device: str, request: pytest.FixtureRequest) -> None:
    """The add refuses them in host memory, the flush on a device."""
    if device == "device":
        request.getfixturevalue("as_if_on_a_device")
    for stats, weight, where in (
        ({"b": 1.0, "f": AnyFlag(t(0.5))}, 1.0, "'f'"),
        ({"b": 1.0, "f": All(t([1.0, math.nan]))}, 1.0, "'f'"),
        ({"b": 1.0, "m": Mean(1.0, weight=t(-1.0))}, 1.0, "'m'"),
        ({"b": t(1.0)}, t([math.inf]), "the"),
        ({"b": t([1.0, 1.0])}, t([1.0, -1.0]), "the"),
    ):
        with StatsWindow() as window:
            if device == "device":
                window.add(stats, weight)
            with pytest.raises(InvalidStats, match=where) as raised:
                window.flush() if device == "device" else window.add(stats, weight)
        assert re.search("is not a flag|a weight is 0, or between", str(raised.value))


def test_values_that_are_too_large_on_a_device_are_found_by_the_flush(as_if_on_a_device: None) -> None:
    large = t(-2e200, dtype=torch.float64)
    with pytest.raises(InvalidStats, match=r"'a': the value is -2e\+200; a finite value is at most 1e\+200"):
        flush_of({"a": large, "b": t(1.0)}, weight=1e-50)


def test_own_weights_that_come_and_go_weigh_nothing_but_means() -> None:
    first = {"m": Mean(1.0), "n": Sum(10), "f": AnyFlag(True), "hi": Max(3.0)}
    second = {"m": Mean(2.0, weight=3), "n": Sum(10), "f": AnyFlag(True), "hi": Max(2.0)}
    reduced = flush_of(first, second, first, weight=8.0)
    assert reduced.values == {"m": (8 + 6 + 8) / 19, "n": 30.0, "f": True, "hi": 3.0}
    assert reduced.weights == {"m": 19.0, "n": 3.0, "f": 3.0, "hi": 3.0}


def test_a_value_after_a_marker_around_none_counts() -> None:
    assert values({"l": 1.0, "a": Sum(None)}, {"l": 1.0, "a": Sum(3)}, {"l": 1.0, "a": Sum(4)}) == {"l": 1.0, "a": 7.0}
    with pytest.raises(SchemaConflict, match="'a'"):
        flush_of({"a": Sum(1)}, {"a": Max(None)}, {"a": Max(1)})


@pytest.mark.parametrize("weight", [math.nan, 1e150])
def test_weight_on_a_device_that_is_no_weight_is_refused_under_skip(weight: float, as_if_on_a_device: None) -> None:
    with pytest.raises(InvalidStats, match="a weight is 0, or between"):
        flush_of({"n": Sum(3)}, weight=t(weight, dtype=torch.float64), nonfinite="skip")


def test_add_without_values_changes_nothing() -> None:
    with StatsWindow() as window:
        for _ in range(2_048):  # the next one folds them
            window.add({"a": 1.0})
        with FakeTensorMode(), pytest.raises(ConfigError, match="FakeTensorMode"):
            window.add({"a": 2.0})
        assert window.adds == 2_048
        assert window.flush().values == {"a": 1.0}


class Broken(dict[str, float]):
    def items(self) -> Any:
        raise KeyError("gone")


def test_error_of_a_foreign_type_is_invalid_stats() -> None:
    with StatsWindow() as window:
        window.add({"a": 1.0})
        with pytest.raises(InvalidStats, match=r"KeyError: 'gone'\nCalled at test_window.py"):
            window.add({"a": Broken()})
        with pytest.raises(InvalidStats, match="'n': the value is a complex tensor"):
            window.add({"n": torch.zeros((), dtype=torch.complex64, device="meta")})
        assert window.flush().values == {"a": 1.0}


def test_sum_of_the_largest_elements_is_a_sum() -> None:
    large = torch.full((3,), 1e200, dtype=torch.float64)
    assert values({"a": Sum(large)}) == ddpstats.reduce_stats({"a": Sum(large)}).values == {"a": pytest.approx(3e200)}


# -- local, and nothing kept ------------------------------------------------------------------------------------------


class NeverArrives(read._DeviceCopy):
    """A copy that stays on its device."""

    def __init__(self, device: torch.device, tensors: list[torch.Tensor]) -> None:
        self._values = {id(tensor): tensor.detach().double() for tensor in tensors}

    def is_ready(self) -> bool:
        return False

    def wait(self) -> dict[int, torch.Tensor]:
        return self._values


def test_no_add_reads_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the device meta have no value: a read of one is an error of torch."""
    monkeypatch.setattr(read, "_DeviceCopy", NeverArrives)
    window = StatsWindow(nonfinite="skip")
    with tensors_off_host(lambda tensor: not tensor.is_cpu):
        for weight in (8, 0, torch.ones(1, device="meta"), torch.ones((), device="meta")):
            runs.train(window, "meta", weight=weight)
    assert window.adds == 36
    loss = torch.ones((), device="meta")
    for reading in (float, bool, torch.Tensor.item, torch.Tensor.tolist):  # the control: each would have raised
        with pytest.raises(RuntimeError, match=r"(?i)meta"):
            reading(loss)
    with pytest.raises(RuntimeError, match=r"(?i)meta"):
        loss.isfinite().nonzero()
    with pytest.raises(InvalidStats, match=r"(?i)the (value|weight) is .*meta"):
        window.flush()
    assert window.adds == 0


@pytest.mark.parametrize("way", ["host", "device"])
def test_values_are_taken_at_the_add(way: str, request: pytest.FixtureRequest) -> None:
    if way == "device":
        request.getfixturevalue("as_if_on_a_device")
    with StatsWindow() as window:
        for count in (1, 200):
            tensors = {f"k{i}": t([1.0]) for i in range(count)}
            weight = t([2.0])
            for add in range(3):
                window.add(tensors, weight=2.0 if add else weight)
                for tensor in tensors.values():
                    tensor += 100
                weight *= 100
                for tensor in tensors.values():
                    tensor -= 100
                window.add({"own": Mean(tensors["k0"], weight=weight), "sum": Sum(tensors["k0"])})
                tensors["k0"].fill_(1.0)
                weight.fill_(2.0)
            flushed = window.flush().values
            assert set(flushed.values()) == {1.0, 3.0}
            assert flushed["sum"] == 3.0


def test_error_of_a_device_is_reported_by_the_flush() -> None:
    with tensors_off_host(), mock.patch("ddpstats._reduction.read.Snapshot.wait", side_effect=RuntimeError("sticky")):
        window = StatsWindow()
        window.add({"a": t(1.0)})
        window.add({"a": 1.0})
        assert window.adds == 2
        with pytest.raises(InvalidStats, match="what was added cannot be read: RuntimeError: sticky"):
            window.flush()


def test_tensor_of_a_wrong_shape_on_a_device_is_refused_at_the_add() -> None:
    with tensors_off_host(), StatsWindow() as window:
        with pytest.raises(InvalidStats, match=r"'a': the value is a tensor of shape \(2, 2\)"):
            window.add({"a": torch.ones(2, 2), "b": t(1.0)})
        assert window.adds == 0


def test_inference_tensors_in_and_out_of_inference_mode() -> None:
    for count in (3, 200):
        with StatsWindow() as window:
            with torch.inference_mode():
                inside = {f"k{i}": torch.ones(1) for i in range(count)}
                window.add(inside)
                window.add({"m": Max(inside["k0"])})
            for _ in range(40):
                window.add(inside)
                window.add({"m": Max(inside["k0"]), "x": t(1.0, requires_grad=True)})
            assert set(window.flush().values.values()) == {1.0}


@pytest.mark.parametrize("way", ["host", "device"])
def test_modes_of_torch_around_an_add(way: str, request: pytest.FixtureRequest) -> None:
    if way == "device":
        request.getfixturevalue("as_if_on_a_device")
    stats = {f"k{i}": t([1.0], requires_grad=True) for i in range(120)} | {"h": t([2.5], dtype=torch.bfloat16)}
    with StatsWindow() as window:
        autocast = lambda: torch.autocast("cpu")  # noqa: E731
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, autocast, forward_ad.dual_level):
            with mode():
                window.add(stats, weight=0.7)
                window.add({**stats, "s": Sum(3)}, weight=t(0.3))
        with torch.device("meta"):  # the default of new tensors
            window.add(stats, weight=1)
        flushed = window.flush().values
    assert (flushed.pop("h"), flushed.pop("s")) == (pytest.approx(2.5), 15.0)
    assert list(flushed.values()) == pytest.approx([1.0] * 120)


@pytest.mark.slow
def test_memory_does_not_grow_with_adds() -> None:
    """Memory is compared at two moments at which all eight structures have as many rows."""
    structures, rows = 7, window_module._MOST_ROWS  # and the one of every other add, which is folded as often
    sizes: list[int] = []
    with StatsWindow() as window:
        tracemalloc.start()
        for _ in range(2):
            for i in range(structures * rows):
                window.add({f"k{j}": t([1.0]) for j in range(5)}, weight=2)
                window.add({"a": 1.0, "m": Max(2.0), f"x{i % structures}": 1e200}, weight=2)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert sizes[1] - sizes[0] < 500_000  # the rows of so many adds hold three and a half million
        assert window.flush().values["a"] == 1.0


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stats", "weight", "where", "what"),
    [
        ({"a": 1.0, "b": {"c": 1j}}, 1.0, "'b/c'", "complex"),
        ({"a": t([1.0]), "b": t([1.0, 2.0])}, 1.0, "'b'", "lengths must be equal"),
        ({"a": "text"}, 1.0, "'a'", "not a leaf"),
        ({"a": 1.0}, -1.0, "", "a weight is 0, or between"),
        ({("a",): 1.0}, 1.0, "", "a key is a str or an int"),
        ({"m": Min(t([]))}, 1.0, "'m'", "empty"),
        ({"a": 1.0, "b": torch.ones((), device="meta")}, 1.0, "'b'", "the value is a meta tensor"),
        ({}, torch.ones((), device="meta"), "", "the weight is a meta tensor"),
    ],
)
def test_an_add_that_fails_says_where_and_changes_nothing(stats: Any, weight: Any, where: str, what: str) -> None:
    before = {"a": t([1.0]), "b": t([1.0]), "z": [Max(2.0)]}
    with StatsWindow() as window:
        for _ in range(2):
            window.add(before)
        with pytest.raises((InvalidStats, SchemaConflict), match=what) as raised:
            window.add(stats, weight)
        assert where in str(raised.value)
        assert re.search(r"Called at test_window.py:\d+ in test_an_add_that_fails", str(raised.value))
        assert raised.value.ranks == (0,)
        assert window.adds == 2
        reduced = window.flush()
        assert reduced.values == values(before)
        assert reduced.total_weight == 2.0


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        ({"x": {"a": 1.0}}, {"x": {"a": Sum(1.0)}}, "x/a"),
        ({"a": [1.0]}, {"a": {"b": 1.0}}, "a"),
        ({"a": 1.0}, {"a": [1.0]}, "a"),
        ({"a": 1.0}, 2.0, None),
    ],
)
def test_adds_that_do_not_fit_each_other(first: Any, second: Any, path: str | None) -> None:
    with StatsWindow() as window:
        window.add(first)
        with pytest.raises(SchemaConflict, match=r"before, .* now\.\n") as raised:
            window.add(second)
        assert raised.value.path == path
        assert "Called at test_window.py:" in str(raised.value)
        window.add(first)
        assert window.flush().values == values(first)


def test_faults_that_only_a_flush_can_see(two_ranks: RankPool) -> None:
    conflict, none, large, none_again, last = alike(two_ranks.run(runs.faults).values())
    assert conflict[0] == "SchemaConflict"
    assert conflict[2] == "a"
    assert large[0] == "InvalidStats"
    assert "rank 0 at 'a': the value is 2e+200; a finite value is at most 1e+200" in large[1]
    assert (none, none_again) == (0, 0)
    assert last == {"a": 4.0}


def test_a_flush_that_meets_another_call(two_ranks: RankPool) -> None:
    text, adds = two_ranks.run(runs.out_of_step).values()[0]
    assert text.startswith("ProtocolMismatch")
    assert "StatsWindow.flush, name='x', nonfinite='propagate'" in text
    assert adds == 0


def test_an_error_before_anything_is_sent_leaves_the_window_as_it_was(two_ranks: RankPool) -> None:
    gone, text, adds = alike(two_ranks.run(runs.closed).values())
    assert gone == "group is gone"
    assert "destroyed" in text
    assert adds == "1"


def test_closed_window_is_empty_and_refuses_adds_and_flushes() -> None:
    window = StatsWindow()
    window.add({"a": 1.0})
    window.close()
    window.close()
    assert window.adds == 0
    for call in (lambda: window.add({"a": 1.0}), window.flush):
        with pytest.raises(ConfigError, match="closed"):
            call()
    with pytest.raises(ConfigError, match="nonfinite"):
        StatsWindow(nonfinite="ignore")  # type: ignore[arg-type]


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_collectives_are_those_of_one_reduction(two_ranks: RankPool) -> None:
    counts = alike(two_ranks.run(runs.counted).values())
    assert counts["add"] == 0
    assert counts["flush"][1:] == [1, 1, 1]
    assert counts["with a minimum"][1:] == [2, 2, 2]


def test_a_rank_without_an_add(two_ranks: RankPool) -> None:
    first, second, third = alike(two_ranks.run(runs.uneven).values())
    assert first == second == ({"a": [2.0, 2.0]}, {"a": [4.0, 3.0]}, {"a": [1, 1]}, 4.0)
    assert third == ({}, {}, {}, 0.0)


def test_threads_that_add(two_ranks: RankPool) -> None:
    sums, weights = alike(two_ranks.run(runs.threads).values())
    assert sums == {"n": 1.0, "sum": 2 * 500 * (1.0 + 3.0)}
    assert weights == {"n": 4000.0, "sum": 2000.0}


def test_training_is_not_touched(two_ranks: RankPool) -> None:
    assert alike(two_ranks.run(runs.traces).values()) == (True, True, True, True, False)


# -- times ------------------------------------------------------------------------------------------------------------


class Event:
    """Stands for an event that the device has not reached until it is waited for."""

    waits = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, end: Event) -> float:
        return 5_000.0

    def record(self, stream: Any) -> None:
        assert stream == "stream"


def test_time_on_a_device_that_fits_no_earlier_stats_is_an_error_on_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpstats._reduction.window.record_event", lambda *, timing: Event())
    with StatsWindow() as window:
        window.add({"time": 1.0})
        with pytest.raises(SchemaConflict, match="'time'"), window.timed("data"):
            pass
        assert window.flush().values == {"time": 1.0}
        with window.timed("data"):
            pass
        with pytest.raises(SchemaConflict, match="'time'"):
            window.add({"time": 1.0})
        assert window.adds == 0
        assert window.flush().values == {"time": {"data": 5.0}}


def test_times_are_means_over_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    with StatsWindow() as window:
        window.add({"loss": 1.0}, weight=8)
        for seconds in (1.0, 2.0):
            with window.timed("data"):
                clock[0] += seconds
        with pytest.raises(ZeroDivisionError), window.timed("step"):
            raise ZeroDivisionError
        assert window.adds == 1
        reduced = window.flush()
        assert reduced.values["time"] == {"data": 1.5, "step": 0.0}
        assert reduced.weights["time"] == {"data": 2.0, "step": 1.0}
        assert (reduced.values["loss"], reduced.total_weight) == (1.0, 8.0)
        assert window.flush().values == {}
        with window.timed("late"):
            window.flush()
        assert list(window.flush().flat()) == ["time/late"]


def test_times_that_do_not_fit() -> None:
    with StatsWindow() as window:
        window.add({"time": 1.0})
        with pytest.raises(SchemaConflict, match="'time'"), window.timed("data"):
            pass
        with pytest.raises(KeyError), window.timed("data"):
            raise KeyError
        with pytest.raises(ConfigError, match="must be a str"), window.timed(1):  # type: ignore[arg-type]
            pass
        assert window.flush().values == {"time": 1.0}


def test_times_of_a_device_are_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of what is asked of a device; that it answers so is for tests/gpu to show."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "Event", lambda device, enable_timing: Event())
    before = Event.waits
    with StatsWindow() as window:
        for _ in range(3):
            with window.timed("step"):
                pass
        assert Event.waits == before
        reduced = window.flush()
    assert (reduced.values, reduced.weights) == ({"time": {"step": 5.0}}, {"time": {"step": 3.0}})
    assert Event.waits == before + 6  # both events of each use


def test_cuda_is_not_initialised() -> None:
    code = (
        "import torch, ddpstats\n"
        "torch.cuda._lazy_init = None  # whatever initialises CUDA calls this\n"
        "window = ddpstats.StatsWindow()\n"
        "with window.timed('a'): window.add({'x': torch.ones(1)})\n"
        "window.flush(); print(torch.cuda.is_initialized())"
    )
    ended = programs.run(["-c", code])
    assert (ended.stdout, ended.stderr) == ("False\n", "")


def test_which_rank_it_was(two_ranks: RankPool) -> None:
    outcomes = two_ranks.run(runs.by_rank).values()
    values, slowest, plain, text = outcomes[0]
    assert repr(outcomes[1]) == repr(outcomes[0])
    own, nan = values.pop("own[0]"), values.pop("own[1]")
    assert values == {
        "loss": ((0 * 1 + 1 * 2 + 2 * 3) / 6, (1 * 1 + 2 * 2 + 3 * 3) / 6),
        "hot": (False, True),
    }
    assert own == (None, 1e200)
    assert (nan[0], math.isnan(nan[1])) == (None, True)
    assert (slowest, plain) == (1, None)
    assert text.startswith("ProtocolMismatch")
    assert "per_rank=True" in text
