"""The calls in which a rank is hurt: each phase is a call that all ranks make, and a point inside of it.

A phase is made before anything happens, called once to be through with first uses, and called again with the fault. On
the rank that is hurt the function at the point does it first, so that it is hurt in the middle of the call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddpstats

_ALL_REDUCE = "ddpstats._ranks.comm:GlooComm.all_reduce"

Call = Callable[[bool], Any]
"""Makes the call; with the argument true as it is when the fault comes. What it returns is the same on every rank."""


@dataclass(frozen=True)
class Phase:
    """``point``: ``module:name.name`` of the function at which a rank is hurt, before or ``after`` its own work.

    ``made``: enters what the program has open meanwhile; its argument is a directory that all ranks write to.
    ``writes``: into that directory.
    """

    words: str
    point: str
    made: Callable[[Path], AbstractContextManager[Call]]
    after: bool = False
    writes: bool = False


@contextlib.contextmanager
def _reduce(directory: Path) -> Iterator[Call]:
    with ddpstats.StatsReducer(name="train") as reducer:
        yield lambda bad: reducer({"loss": float(dist.get_rank())}).values


@contextlib.contextmanager
def _new_keys(directory: Path) -> Iterator[Call]:
    with ddpstats.StatsReducer(name="train") as reducer:
        yield lambda bad: reducer({"loss": 1.0, f"only on {dist.get_rank()}, {bad}": 2.0}).values


@contextlib.contextmanager
def _window(directory: Path) -> Iterator[Call]:
    with ddpstats.StatsWindow(name="train") as window:

        def call(bad: bool) -> Any:
            for step in range(3):
                window.add({"loss": float(step)}, weight=2.0)
            return window.flush().values

        yield call


def _with_gradients(model: torch.nn.Module, bad: bool = False) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan if bad else 1.0)


@contextlib.contextmanager
def _step_checks(directory: Path) -> Iterator[Call]:
    model = torch.nn.Linear(2, 1)
    with (
        ddpstats.collective_guard("step") as guard,
        ddpstats.NaNCapture(directory, model=model) as capture,
        ddpstats.Sentinel(model, mode=2) as sentinel,
    ):
        checks = ddpstats.StepChecks(capture=capture, sentinel=sentinel, guard=guard)

        def call(bad: bool) -> Any:
            _with_gradients(model)
            dist.all_reduce(torch.ones(1))
            return checks.step().ok

        yield call


@contextlib.contextmanager
def _guard(mode: Any, directory: Path) -> Iterator[Call]:
    with ddpstats.collective_guard(mode) as guard:

        def call(bad: bool) -> Any:
            total = torch.ones(1)
            dist.all_reduce(total)
            guard.step()
            return total.item()

        yield call


@contextlib.contextmanager
def _capture(bundle: bool, directory: Path) -> Iterator[Call]:
    model = torch.nn.Linear(64, 64)
    with ddpstats.NaNCapture(directory, model=model, on_nonfinite="skip") as capture:

        def call(bad: bool) -> Any:
            with capture.micro_batch(torch.ones(2, 64)):
                pass
            _with_gradients(model, bad and bundle and dist.get_rank() == 0)
            verdict = capture.check()
            return [verdict.ok, verdict.should_stop, verdict.message]

        yield call


@contextlib.contextmanager
def _dump(directory: Path) -> Iterator[Call]:
    model = torch.nn.Linear(64, 64)
    dump = ddpstats.StatsDump({"task": "statistics", "level": "mix", "dump_path": str(directory)}, model=model)
    with ddpstats.StatsReducer(name="train") as reducer:

        def call(bad: bool) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dump.start()
                model(torch.ones(2, 64)).sum().backward()
                dump.stop()
            dump.step()
            return reducer({"loss": 1.0}).values

        yield call


PHASES = {
    "reduce": Phase("a reduction", _ALL_REDUCE, _reduce),
    "new keys": Phase("a reduction with new keys", "ddpstats._ranks.comm:GlooComm.all_gather", _new_keys),
    "window": Phase("the flush of a window", _ALL_REDUCE, _window),
    "step checks": Phase("`StepChecks.step()`", _ALL_REDUCE, _step_checks),
    "guard step": Phase(
        '`guard.step()`, mode "step"', "ddpstats.guard.compare:Comparing.step", functools.partial(_guard, "step")
    ),
    "guard strict": Phase(
        'a collective, mode "strict"', "ddpstats.guard.compare:Comparing.post", functools.partial(_guard, "strict")
    ),
    "guard compared": Phase(
        "the same, compared and not begun",
        "ddpstats.guard.compare:Comparing.settle",
        functools.partial(_guard, "strict"),
        after=True,
    ),
    "capture": Phase("`NaNCapture.check()`", _ALL_REDUCE, functools.partial(_capture, False)),
    "bundle": Phase(
        "a bundle is written", "ddpstats._rerun.codec:write", functools.partial(_capture, True), True, True
    ),
    "dump": Phase(
        "a dump is written, then a reduction",
        "ddpstats.dump.writer:StepWriter._write_dump",
        _dump,
        True,
        True,
    ),
}


@contextlib.contextmanager
def hurt_at(phase: Phase, hurt: Callable[[], object]) -> Iterator[None]:
    """Inside, the first call of the function at the phase's point also does ``hurt``."""
    module, _, path = phase.point.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, __import__(module, fromlist=["_"]))
    original, calls = getattr(owner, name), itertools.count()

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        is_first = next(calls) == 0
        if is_first and not phase.after:
            hurt()
        result = original(*args, **kwargs)
        if is_first and phase.after:
            hurt()
        return result

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, original)
