"""Our entry points inside `torch.compile`, and where tensors have no values."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import ddpstats
from ddpstats.errors import ConfigError
from ddpstats.testing import RankPool

LIMIT_SEC = 120.0

Calls = dict[str, Callable[[torch.Tensor], Any]]


def entry_points(group: Any) -> Calls:
    reducer = ddpstats.StatsReducer(group=group, timeout_sec=60)
    return {
        "reducer": lambda y: reducer({"a": y.sum()}).values["a"],
        "markers": lambda y: reducer({"s": ddpstats.Sum(y.sum()), "m": ddpstats.Mean(y.sum(), 2.0)}).values["m"],
        "start": lambda y: reducer.start({"a": y.sum()}).result().values["a"],
        "reduce_stats": lambda y: ddpstats.reduce_stats({"a": y.sum()}, group=group).values["a"],
        "any_rank": lambda y: 6.0 * ddpstats.any_rank(True, group=group),
        "all_ranks": lambda y: 6.0 * ddpstats.all_ranks(True, group=group),
        "recursive_average": lambda y: ddpstats.recursive_average({"a": y.sum()}, y.sum(), True, group=group)[0]["a"],
        "recursive_sum": lambda y: (
            ddpstats.recursive_sum({"a": y.sum()}, y.sum() / y.sum(), True, group=group)["a"] / 2
        ),
    }


def compiled() -> dict[str, Any]:
    """Each inside a compiled function, three times; a graph before it and one behind it."""
    found = {}
    for name, call in entry_points(dist.new_group()).items():

        def step(x: torch.Tensor, call: Any = call) -> torch.Tensor:
            y = x * 2
            result: torch.Tensor = y + call(y)
            return result

        graphs: list[Any] = []

        def backend(module: Any, inputs: Any, graphs: Any = graphs) -> Any:
            graphs.append(module)
            return module.forward

        run: Any = torch.compile(step, backend=backend)
        found[name] = [run(torch.ones(3)).tolist() for _ in range(3)], len(graphs) >= 2
    return found


def test_they_break_the_graph_and_work(two_ranks: RankPool) -> None:
    for found in two_ranks.run(compiled, timeout_sec=LIMIT_SEC).values():
        for name, (values, is_broken) in found.items():
            assert values == [[8.0] * 3] * 3, name
            assert is_broken, name


def without_values() -> list[Any]:
    group = dist.new_group()
    calls = entry_points(group)
    before = [calls["reduce_stats"](torch.ones(3))]
    with FakeTensorMode():
        for call in calls.values():
            with pytest.raises(ConfigError, match="under FakeTensorMode"):
                call(torch.ones(3))
        with pytest.raises(ConfigError, match="under FakeTensorMode"):  # a first use: nothing is set up either
            ddpstats.any_rank(True)
    return [*before, *(float(call(torch.ones(3))) for call in calls.values()), ddpstats.any_rank(True)]


def test_without_values_they_are_refused_and_nothing_is_closed(two_ranks: RankPool) -> None:
    found = two_ranks.run(without_values, timeout_sec=LIMIT_SEC).values()
    assert found[0] == found[1]
    assert found[0][:3] == [3.0, 3.0, 3.0]
    assert found[0][-1] is True


def test_nothing_of_ours_imports_dynamo() -> None:
    code = "import sys, ddpstats; ddpstats.reduce_stats({'a': 1.0}); ddpstats.any_rank(True); "
    code += "assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_SEC)
