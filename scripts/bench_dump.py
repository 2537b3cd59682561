"""What `StatsDump` costs: a training step of a small transformer that is dumped, and one that is not, interleaved.

Copies of one model take turns in one process, with one thread; each has its own optimizer. A dumped step is timed from
`start` to the end of `step`, so the files are part of it; every one has a directory of its own. "Idle": enabled, and
this step not chosen. "Until stop": forward and backward alone, which is what an asynchronous dump is to leave in peace.

msprobe has one debugger in a process, and replaces torch's functions: each of its levels has a process of its own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _bench_loop import Budget, Timings, interleaved
from torch import nn

from ddpstats.dump import StatsDump

WIDTH, SEQUENCES, LENGTH = 256, 8, 128
_CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "idle": {"level": "mix", "step": [0]},
    "L0": {"level": "L0"},
    "L0, async": {"level": "L0", "async_dump": True},
    "L1": {"level": "L1"},
    "L1, async": {"level": "L1", "async_dump": True},
    "mix": {"level": "mix"},
    "mix, async": {"level": "mix", "async_dump": True},
    "mix, md5": {"level": "mix", "statistics": {"summary_mode": "md5"}},
    "mix, tensors": {"level": "mix", "task": "tensor"},
    "mix, tensors, async": {"level": "mix", "task": "tensor", "async_dump": True, "tensor": {"list": ["."]}},
}
MSPROBE_NAMES = ("L0", "L1", "mix", "mix, tensors")
UNTIL_STOP = ("mix", "mix, async", "mix, tensors", "mix, tensors, async")


def dump_costs(layers: int, sequences: int, budget: Budget) -> Timings:
    """Seconds per step of each kind, of so many layers and sequences. Collective on the default group."""
    torch.set_num_threads(1)
    tokens = torch.randn(sequences, LENGTH, WIDTH)
    with tempfile.TemporaryDirectory() as scratch:

        def step(name: str, directory: str, until_stop: bool = False) -> Callable[[int], object]:
            path, config = Path(scratch) / directory, _CONFIGS[name]
            dump = None if config is None else StatsDump({"dump_path": str(path), **config})
            return _step(layers, path, dump, tokens, until_stop)

        bodies = {name: step(name, name) for name in _CONFIGS}
        bodies |= {f"{name}, until stop": step(name, f"{name}, until stop", True) for name in UNTIL_STOP}
        return _timed(bodies, budget)


def msprobe_costs(name: str, layers: int, sequences: int, budget: Budget) -> Timings | None:
    """Return seconds per plain step, and per step that msprobe dumps by our configuration of that name.

    None where msprobe is not installed.
    """
    try:
        from msprobe.pytorch import PrecisionDebugger
    except ImportError:
        return None
    torch.set_num_threads(1)
    tokens = torch.randn(sequences, LENGTH, WIDTH)
    with tempfile.TemporaryDirectory() as scratch:
        path, config = Path(scratch) / "dump", Path(scratch) / "config.json"
        task = {"task": "statistics", **(_CONFIGS[name] or {})}
        options = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
        config.write_text(
            json.dumps({**task, "dump_path": str(path), "rank": [], "step": [], task["task"]: options}),
        )
        dump = PrecisionDebugger(config_path=str(config))
        bodies = {"plain": _step(layers, path, None, tokens), "msprobe": _step(layers, path, dump, tokens)}
        return _timed(bodies, replace(budget, seconds=budget.seconds / 4))


def _timed(bodies: dict[str, Callable[[int], object]], budget: Budget) -> Timings:
    for body in bodies.values():
        body(0)
    timings = interleaved(bodies, budget)
    _raise_failed()
    return timings


def _step(
    layers: int, path: Path, dump: Any, tokens: torch.Tensor, until_stop: bool = False
) -> Callable[[int], object]:
    """Return a step of a new model, which ``dump`` dumps below ``path`` if it is not None."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        model(tokens).square().mean().backward()

    def rest() -> None:
        if dump is not None:
            dump.stop()
        optimizer.step()
        optimizer.zero_grad()
        if dump is not None:
            dump.step()

    def body(_: int) -> object:
        _raise_failed()
        if dump is not None:
            dump.start(model=model)
        train()
        if until_stop:
            return _Afterwards(rest, path)
        rest()
        return _Afterwards(None, path)

    return body


_failed: list[BaseException] = []
"""What the rest of a step has raised. Python prints what `__del__` raises, and goes on: the next body raises it."""


def _raise_failed() -> None:
    if _failed:
        raise _failed[0]


class _Afterwards:
    """When the clock has stopped: the rest of the step, and what it has written is removed."""

    def __init__(self, rest: Callable[[], None] | None, path: Path) -> None:
        self._rest, self._path = rest, path

    def __del__(self) -> None:
        try:
            if self._rest is not None:
                self._rest()
        except BaseException as error:
            _failed.append(error)
        for step in self._path.glob("step*"):
            shutil.rmtree(step)
