"""What `StatsDump` costs: a training step of a small transformer that is dumped, and one that is not, interleaved.

Copies of one model take turns in one process, with one thread; each has its own optimizer. A dumped step is timed from
`start` to the end of `step`, so the files are part of it; every one has a directory of its own. "Idle": enabled, and
this step not chosen. "Until stop": forward and backward alone, which is what an asynchronous dump is to leave in peace.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
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
UNTIL_STOP = ("mix", "mix, async", "mix, tensors", "mix, tensors, async")


def dump_costs(layers: int, sequences: int, budget: Budget) -> Timings:
    """Seconds per step of each kind, of so many layers and sequences. Collective on the default group."""
    torch.set_num_threads(1)
    tokens = torch.randn(sequences, LENGTH, WIDTH)
    with tempfile.TemporaryDirectory() as scratch:
        bodies = {name: _step(layers, Path(scratch) / name, config, tokens) for name, config in _CONFIGS.items()}
        for name in UNTIL_STOP:
            path = Path(scratch) / f"{name}, until stop"
            bodies[path.name] = _step(layers, path, _CONFIGS[name], tokens, until_stop=True)
        for body in bodies.values():
            body(0)
        timings = interleaved(bodies, budget)
        _raise_failed()
        return timings


def _step(
    layers: int, path: Path, config: dict[str, Any] | None, tokens: torch.Tensor, until_stop: bool = False
) -> Callable[[int], object]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dump = None if config is None else StatsDump({"dump_path": str(path), **config}, model=model)

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
            dump.start()
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
