"""A module that keeps objects of ddpstats can be copied and pickled: reducers go on in the copy, watchers ignore it."""

from __future__ import annotations

import copy
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
    window, equal = StatsWindow(name="train"), StatsWindow(name="train")
    for add in STATS[kind]:
        for each in (window, equal):
            each.add(add, 2.0)
    with window.timed("step"):
        pass
    copied = way(window)
    assert copied.adds == window.adds == len(STATS[kind])
    for _ in range(2):  # the second is quick where the first is not
        copied.add({"only": 1.0})
        copied.add(STATS[kind][0])
    assert (window.adds, copied.adds) == (len(STATS[kind]), len(STATS[kind]) + 4)
    of_window, of_copy, expected = window.flush().flat(), copied.flush(), equal.flush().flat()
    assert of_window.pop("time/step") == of_copy.flat()["time/step"]
    assert of_window == expected, "the copy has changed nothing"
    assert of_copy.values["only"] == 1.0
    assert of_copy.flat().keys() == of_window.keys() | {"only", "time/step"}
    assert (window.adds, copied.adds, copied.counters.calls) == (0, 0, 1)


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


def kept_by_a_rank() -> list[Any]:
    rank = dist.get_rank()
    module: Any = Keeping(plain=StatsReducer(), own=StatsReducer(group=dist.new_group()))
    module.own.start({"a": 1.0}).result()  # keeps a thread
    with pytest.raises(ConfigError, match=r"make what has group= on each rank, there"):
        pickle.dumps(module)
    copied = copy.deepcopy(module)
    pending = module.own.start({"a": 1.0 + rank})
    module.own.close()
    results = [pending.result().values, spawned(module.plain)({"b": 1.0 + rank}).values]
    results += [copied.own.start({"a": 3.0 * rank}).result().values, copied.plain({"b": 2.0}).values]
    copied.own.close()
    return results


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
        for copied in (copy.deepcopy(module), spawned(module)):
            copied(batch).sum().backward()
            calls = {
                copied.capture.micro_batch(batch).__enter__: "NaNCapture",
                copied.capture.check: "NaNCapture",
                copied.sentinel.step: "Sentinel",
                copied.checks.step: "NaNCapture",
            }
            for call, name in calls.items():
                with pytest.raises(ConfigError, match=f"watches nothing: make a {name} for the copied model"):
                    call()
            copied.sentinel.check_matmuls(1)
            assert copied.capture.dirpath == tmp_path
            copied.capture.close()
            copied.sentinel.close()
        for _ in range(2):
            with module.capture.micro_batch(batch):
                module(batch).sum().backward()
            assert module.checks.step().ok
    assert module.capture.step == 2
    module.capture.close()
    module.sentinel.close()
    with pytest.raises(ConfigError, match=r"NaNCapture\.check\(\) after close\(\)"):
        module.capture.check()


def test_a_copy_of_a_guard_is_not_entered() -> None:
    with collective_guard("strict", timeout_sec=7) as guard:
        copied = copy.deepcopy(guard)
        with copied:
            assert guard_room._active == [guard]  # a guard within another does nothing
    with spawned(copied) as arrived:
        arrived.step()
    assert (arrived.mode, arrived.counters.steps, guard.counters.steps) == ("strict", 1, 0)


def test_a_copy_of_a_dump_collects_nothing_until_it_is_started(tmp_path: Path) -> None:
    settings = {"task": "statistics", "dump_path": str(tmp_path), "rank": [], "step": [], "level": "L0"}
    module: Any = Keeping()
    module.dump = StatsDump(settings, model=module)
    module.dump.start()
    copied = copy.deepcopy(module)
    copied(torch.ones(4, 2)).sum().backward()
    copied.dump.step()
    module.dump.step()
    assert "Keeping.forward" not in (tmp_path / "step0" / "rank" / "dump.json").read_text()
    copied.dump.start()
    copied(torch.ones(4, 2)).sum().backward()
    copied.dump.step()
    assert "Keeping.forward" in (tmp_path / "step1" / "rank" / "dump.json").read_text()


def test_what_a_reduction_returned_is_copied_as_it_is() -> None:
    reduced = ddpstats.reduce_stats({"a": 1.0}, per_rank=True)
    for copied in (copy.deepcopy(reduced), spawned(reduced)):
        assert copied.values == reduced.values
