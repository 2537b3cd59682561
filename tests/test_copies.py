"""A module that keeps objects of ddpstats can be copied and pickled: reducers go on in the copy, watchers ignore it."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ddpstats
from ddpstats import ConfigError, Max, NaNCapture, Sentinel, StatsDump, StatsReducer, StatsWindow, StepChecks, Sum
from ddpstats.errors import InvalidStats
from ddpstats.guard import collective_guard, guard as guard_room
from ddpstats.testing import RankPool
from tests.reduction.off_host import tensors_off_host


class Keeping(torch.nn.Linear):
    """A module that keeps more than parameters."""

    def __init__(self, **kept: Any) -> None:
        super().__init__(2, 1)
        vars(self).update(kept)


def spawned(kept: Any) -> Any:
    """As it arrives in a process that is spawned."""
    return pickle.loads(ForkingPickler.dumps(kept))


WAYS: list[Callable[[Any], Any]] = [copy.deepcopy, copy.copy, spawned]
MANY = {f"key_{i}": torch.full((1,), float(i)) for i in range(100)}  # rows that are tensors
STATS: dict[str, list[dict[str, Any]]] = {
    "numbers": [{"loss": 0.1 * i, "tokens": i} for i in range(700)],
    "tensors": [{"loss": torch.tensor(0.5), "tokens": 2.0}] * 3,
    "many tensors": [MANY] * 3,
    "other keys": [{"a": 1.0}, {"b": [Max(2.0), {"c": Sum(1e200)}]}, {"b": [Max(3.0), {"c": Sum(1e200)}]}, {"a": None}],
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.__name__))
@pytest.mark.parametrize("kind", STATS)
def test_a_copy_of_a_window_starts_with_what_was_added_and_goes_on_by_itself(
    kind: str, way: Callable[[Any], Any]
) -> None:
    window, alike = StatsWindow(name="train"), StatsWindow(name="train")
    for add in STATS[kind]:
        for one in (window, alike):
            one.add(add, 2.0)
    with window.timed("step"):
        pass
    found = way(window)
    assert found.adds == window.adds == len(STATS[kind])
    for _ in range(2):  # the second is quick where the first is not
        found.add({"only": 1.0})
        found.add(STATS[kind][0])
    assert (window.adds, found.adds) == (len(STATS[kind]), len(STATS[kind]) + 4)
    mine, theirs, expected = window.flush().flat(), found.flush(), alike.flush().flat()
    assert mine.pop("time/step") == theirs.flat()["time/step"]
    assert mine == expected, "the copy has changed nothing"
    assert theirs.values["only"] == 1.0
    assert theirs.flat().keys() == mine.keys() | {"only", "time/step"}
    assert (window.adds, found.adds, found.counters.calls) == (0, 0, 1)


def test_an_equal_window_gives_the_same_bits() -> None:
    window = StatsWindow()
    for add in STATS["numbers"]:
        window.add(add, 3.0)
    copies = [way(window).flush().values for way in WAYS]
    assert copies == [window.flush().values] * len(WAYS)


def test_copy_of_a_window_waits_for_values_on_a_device() -> None:
    window = StatsWindow()
    with tensors_off_host(), mock.patch("ddpstats._reduction.read.Snapshot.is_ready", return_value=False):
        window.add({"a": torch.ones(1)})
        copies = [way(window) for way in WAYS]
        window.add({"a": torch.tensor(3.0)})
    assert [copied.flush().values for copied in copies] == [{"a": 1.0}] * len(WAYS)
    assert window.flush().values == {"a": 2.0}


def test_copy_of_a_window_keeps_what_is_wrong_with_a_value_on_a_device() -> None:
    window = StatsWindow()
    with tensors_off_host():
        window.add({"a": Sum(torch.tensor(2e200, dtype=torch.float64))})
    for copied in [*(way(window) for way in WAYS), window]:
        with pytest.raises(InvalidStats, match="'a': the value is 2e"):
            copied.flush()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.__name__))
def test_a_copy_of_a_reducer_counts_its_own_calls(way: Callable[[Any], Any]) -> None:
    reducer = StatsReducer()
    reducer({"a": 1.0})
    found = way(reducer)
    found({"a": 1.0})
    assert (reducer.counters.calls, found.counters.calls) == (1, 2)


def kept_by_a_rank() -> list[Any]:
    rank = dist.get_rank()
    module: Any = Keeping(plain=StatsReducer(), own=StatsReducer(group=dist.new_group()))
    module.own.start({"a": 1.0}).result()  # keeps a thread
    with pytest.raises(ConfigError, match=r"make what has group= on each rank, there"):
        pickle.dumps(module)
    copied = copy.deepcopy(module)
    pending = module.own.start({"a": 1.0 + rank})
    assert copy.deepcopy(pending) is copy.copy(pending) is pending
    with pytest.raises(ConfigError, match=r"call result\(\), and keep what it returns"):
        pickle.dumps(pending)
    module.own.close()
    found = [pending.result().values, spawned(module.plain)({"b": 1.0 + rank}).values]
    found += [copied.own.start({"a": 3.0 * rank}).result().values, copied.plain({"b": 2.0}).values]
    copied.own.close()
    return found


def test_copied_reducers_reduce_on_real_ranks(two_ranks: RankPool) -> None:
    expected = [{"a": 1.5}, {"b": 1.5}, {"a": 1.5}, {"b": 2.0}]
    assert two_ranks.run(kept_by_a_rank, timeout_sec=60).values() == [expected] * 2


def test_what_watches_a_module_does_not_watch_its_copy(tmp_path: Path) -> None:
    module: Any = Keeping()
    module.capture, module.sentinel = (
        NaNCapture(tmp_path, model=module),
        Sentinel(module, mode=2, checkpoints=[Keeping]),
    )
    module.guard = collective_guard("step")
    module.checks = StepChecks(capture=module.capture, sentinel=module.sentinel, guard=module.guard)
    batch = torch.ones(4, 2)
    with module.guard:
        for found in (copy.deepcopy(module), spawned(module)):
            found(batch).sum().backward()
            calls = {
                found.capture.micro_batch(batch).__enter__: "NaNCapture",
                found.capture.check: "NaNCapture",
                found.sentinel.step: "Sentinel",
                found.checks.step: "NaNCapture",
            }
            for call, name in calls.items():
                with pytest.raises(ConfigError, match=f"watches nothing: make a {name} for the copied model"):
                    call()
            found.sentinel.check_matmuls(1)
            assert found.capture.dirpath == tmp_path
            found.capture.close()
            found.sentinel.close()
        for _ in range(2):
            with module.capture.micro_batch(batch):
                module(batch).sum().backward()
            assert module.checks.step().ok
    assert module.capture.step == 2
    module.capture.close()
    module.sentinel.close()
    with pytest.raises(ConfigError, match=r"NaNCapture\.check\(\) after close\(\)"):
        module.capture.check()


def steps_of_one_rank(path: Path) -> bool:
    """Over a group in which this rank is alone: the other one makes no step."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    limited = mock.patch.dict(os.environ, {"DDPSTATS_TIMEOUT_SEC": "5"})
    with limited, NaNCapture(path, model=Keeping(), group=groups[dist.get_rank()]) as capture:
        copied = copy.copy(StepChecks(capture=capture))
        return dist.get_rank() == 1 or copied.step().ok


def test_a_shallow_copy_of_checks_asks_the_group_of_its_parts(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(steps_of_one_rank, tmp_path, timeout_sec=60).values() == [True, True]


def test_a_copy_of_a_guard_is_not_entered() -> None:
    with collective_guard("strict", timeout_sec=7) as guard:
        found = copy.deepcopy(guard)
        with found:
            assert guard_room._active == [guard]  # a guard within another does nothing
    with spawned(found) as other:
        other.step()
    assert (other.mode, other.counters.steps, guard.counters.steps) == ("strict", 1, 0)


def test_a_copy_of_a_dump_collects_nothing_until_it_is_started(tmp_path: Path) -> None:
    settings = {"task": "statistics", "dump_path": str(tmp_path), "rank": [], "step": [], "level": "L0"}
    module: Any = Keeping()
    module.dump = StatsDump(settings, model=module)
    module.dump.start()
    found = copy.deepcopy(module)
    found(torch.ones(4, 2)).sum().backward()
    found.dump.step()
    module.dump.step()
    assert "Keeping.forward" not in (tmp_path / "step0" / "rank" / "dump.json").read_text()
    found.dump.start()
    found(torch.ones(4, 2)).sum().backward()
    found.dump.step()
    assert "Keeping.forward" in (tmp_path / "step1" / "rank" / "dump.json").read_text()


def test_what_a_reduction_returned_is_copied_as_it_is() -> None:
    reduced = ddpstats.reduce_stats({"a": 1.0}, per_rank=True)
    for found in (copy.deepcopy(reduced), spawned(reduced)):
        assert found.values == reduced.values
