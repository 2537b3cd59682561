"""Every public call breaks the graph inside `torch.compile` and works, and is refused where tensors have no values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import ddpstats
from ddpstats.errors import ConfigError
from ddpstats.testing import RankPool
from tests import programs

LIMIT_SEC = 120.0

Calls = dict[str, Callable[[torch.Tensor], Any]]


def through_window(window: ddpstats.StatsWindow, y: torch.Tensor) -> float:
    window.add({"a": y.sum()})
    window.add({"a": y.sum()})
    total: float = window.flush().values["a"]
    return total


def entry_points(group: Any) -> Calls:
    window = ddpstats.StatsWindow(group=group, timeout_sec=60)
    reducer = ddpstats.StatsReducer(group=group, timeout_sec=60)
    return {
        "reducer": lambda y: reducer({"a": y.sum()}).values["a"],
        "markers": lambda y: reducer({"s": ddpstats.Sum(y.sum()), "m": ddpstats.Mean(y.sum(), 2.0)}).values["m"],
        "start": lambda y: reducer.start({"a": y.sum()}).result().values["a"],
        "reduce_stats": lambda y: ddpstats.reduce_stats({"a": y.sum()}, group=group).values["a"],
        "window": lambda y: through_window(window, y),
        "any_rank": lambda y: 6.0 * ddpstats.any_rank(True, group=group),
        "all_ranks": lambda y: 6.0 * ddpstats.all_ranks(True, group=group),
        "recursive_average": lambda y: ddpstats.recursive_average({"a": y.sum()}, y.sum(), True, group=group)[0]["a"],
        "recursive_sum": lambda y: (
            ddpstats.recursive_sum({"a": y.sum()}, y.sum() / y.sum(), True, group=group)["a"] / 2
        ),
    }


def compiled() -> dict[str, Any]:
    """Make each call inside a compiled function, three times; a graph comes before it and one after it."""
    results = {}
    for name, call in entry_points(dist.new_group()).items():

        def step(x: torch.Tensor, call: Any = call) -> torch.Tensor:
            y = x * 2
            result: torch.Tensor = y + call(y)
            return result

        graphs: list[Any] = []

        def backend(module: Any, inputs: Any, graphs: Any = graphs) -> Any:
            graphs.append(module)
            return module.forward

        torch.compiler.reset()  # otherwise Dynamo gives up on ``step``, which has compiled it too often
        run: Any = torch.compile(step, backend=backend)
        results[name] = [run(torch.ones(3)).tolist() for _ in range(3)], len(graphs) >= 2
    return results


@pytest.mark.slow
def test_calls_in_compiled_code_break_the_graph_and_work(two_ranks: RankPool) -> None:
    for results in two_ranks.run(compiled, timeout_sec=LIMIT_SEC).values():
        for name, (values, is_broken) in results.items():
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


def test_calls_without_tensor_values_are_refused_and_close_nothing(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(without_values, timeout_sec=LIMIT_SEC).values()
    assert first == second
    assert first[:3] == [3.0, 3.0, 3.0]
    assert first[-1] is True


def watchers(directory: str, guard: ddpstats.collective_guard, group: Any) -> dict[str, Callable[[], Any]]:
    """Return the calls that judge, compare and record a step."""
    model = torch.nn.Linear(2, 1)
    dump = ddpstats.StatsDump({"level": "L1", "dump_path": f"{directory}/dump", "step": [100]})
    return {
        "NaNCapture.check": ddpstats.NaNCapture(directory, model=model, group=group).check,
        "Sentinel.step": ddpstats.Sentinel(model, mode=1, group=group).step,
        "collective_guard.step": guard.step,
        "StatsDump.start": dump.start,
        "StatsDump.stop": dump.stop,
        "StatsDump.step": dump.step,
    }


def watched(directory: str) -> dict[str, Any]:
    """Return for each call the values of a compiled function that makes it three times, and the number of graphs."""
    with ddpstats.collective_guard("step", timeout_sec=60) as guard:
        return {name: run_compiled(call) for name, call in watchers(directory, guard, dist.new_group()).items()}


def run_compiled(call: Callable[[], Any]) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        call()
        return y + 1

    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    run: Any = torch.compile(step, backend=backend)
    try:
        return [run(torch.ones(3)).tolist() for _ in range(3)], len(graphs)
    except Exception as error:
        return repr(error)[:300]


@pytest.mark.slow
def test_step_checks_in_compiled_code_break_the_graph_and_work(two_ranks: RankPool, tmp_path: Path) -> None:
    for results in two_ranks.run(watched, str(tmp_path), timeout_sec=LIMIT_SEC).values():
        assert results == dict.fromkeys(results, ([[3.0] * 3] * 3, 2))
        assert len(results) == 6


def watched_without_values(directory: str) -> list[Any]:
    calls = watchers(directory, ddpstats.collective_guard("off"), dist.new_group())
    judges = [calls[name] for name in ("NaNCapture.check", "Sentinel.step")]
    with FakeTensorMode():
        for call in judges:  # a first use: nothing is set up either
            with pytest.raises(
                ConfigError, match=r"(NaNCapture\.check|Sentinel\.step) was called under FakeTensorMode"
            ):
                call()
    return [(verdict.step, verdict.ok) for call in judges for verdict in (call(), call())]


def test_steps_without_tensor_values_are_not_judged(two_ranks: RankPool, tmp_path: Path) -> None:
    verdicts = two_ranks.run(watched_without_values, str(tmp_path), timeout_sec=LIMIT_SEC).values()
    assert verdicts == [[(0, True), (1, True)] * 2] * 2


@pytest.mark.slow
def test_reductions_do_not_import_dynamo() -> None:
    code = "import sys, ddpstats; ddpstats.reduce_stats({'a': 1.0}); ddpstats.any_rank(True); "
    code += "assert 'torch._dynamo' not in sys.modules"
    ended = programs.run(["-c", code], fresh=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("how", "whole"), [("a step function", True), ("a step function", False), ("in place", False)])
def test_a_capture_leaves_a_compiled_program_as_it_is(tmp_path: Path, how: str, whole: bool) -> None:
    """The capture's hook on the forward pass is traced with the program."""
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    if how == "in place":
        model.compile(backend="eager")
    function: Any = lambda x: model(x).sum()  # noqa: E731
    step = function if how == "in place" else torch.compile(function, backend="eager", fullgraph=whole)
    with ddpstats.NaNCapture(tmp_path, model=model) as capture:
        for bad in (False, True, False):
            x = torch.full((3, 2), torch.nan) if bad else torch.ones(3, 2)
            with capture.micro_batch(x):
                step(x).backward()
            assert capture.check().ok is not bad
            model.zero_grad()
