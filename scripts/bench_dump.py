"""Rows of `scripts/bench.py` on `StatsDump`: training steps of a small transformer that is dumped, and plain ones.

Copies of one model take turns in one process with one thread, each with its own optimizer and a directory that is empty
before each step. A dumped step lasts from `start` to the end of `step`, so its files are part of it; "until stop" is
the forward and backward pass alone, which an asynchronous dump is to leave in peace. Steps that save all tensors are
measured by themselves: each writes 340 MB, which keep the disk and a core busy long after its end. So is "idle", a dump
that is enabled, but not in this step; it takes turns with plain steps on one model, whose memory is then the same.
msprobe replaces torch's functions and has one debugger in a process: each of its levels runs in a separate process.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_rows import Row, Variant, ratios, take_turns
from torch import nn

from ddpstats.dump import StatsDump

_WIDTH, _SEQUENCES, _LENGTH, _LAYERS = 256, 8, 128, 2
_WHAT = "dump, a step of a small transformer"
_TENSORS = {"level": "mix", "task": "tensor"}
_CONFIGS: dict[str, dict[str, Any]] = {
    "L0": {"level": "L0"},
    "L1": {"level": "L1"},
    "mix": {"level": "mix"},
    "mix, md5": {"level": "mix", "statistics": {"summary_mode": "md5"}},
    "mix, tensors": _TENSORS,
    "L0, async": {"level": "L0", "async_dump": True},
    "L1, async": {"level": "L1", "async_dump": True},
    "mix, async": {"level": "mix", "async_dump": True},
    "mix, tensors, async": {**_TENSORS, "async_dump": True, "tensor": {"list": ["."]}},
}
_LIMITS = {"L0": 1.4, "L1": 1.5, "mix": 1.9}
_KINDS = {
    "statistics": ("L0", "L1", "mix", "mix, md5"),
    "async": ("L0", "L1", "mix", "L0, async", "L1, async", "mix, async"),
    "tensors": ("mix, tensors", "mix, tensors, async"),
}


def dump(seconds: float, what: str) -> list[Row]:
    """Return a step of each kind as times of a plain one, and asynchronous ones as times of synchronous ones."""
    names = _KINDS[what]
    pairs = [name for name in names if f"{name}, async" in names]
    with tempfile.TemporaryDirectory() as scratch:

        def variant(name: str, until_stop: bool = False) -> Variant:
            path = Path(scratch) / f"{name} {until_stop}"
            return _step(path, StatsDump({"dump_path": str(path), **_CONFIGS[name]}), _training(), until_stop)

        variants = {"plain": _step(Path(scratch), None, _training()), **{name: variant(name) for name in names}}
        for kind in pairs[-1:]:
            variants[f"{kind}, until stop"] = variant(kind, True)
            variants[f"{kind}, async, until stop"] = variant(f"{kind}, async", True)
        if what == "tensors":
            variants["torch.save of these tensors alone"] = _saving(Path(scratch) / "saved")
        times = take_turns(variants, seconds)
    rows = [Row(f"{_WHAT}, {what}: plain", [1e3 * sample for sample in times["plain"]], unit="ms")]
    for name in list(variants)[1:]:
        if name not in _LIMITS or what == "statistics":  # otherwise for the rows below
            rows.append(Row(f"{_WHAT}: {name} / plain", ratios(times, name, "plain"), _LIMITS.get(name)))
    for kind, until in (*((name, "") for name in pairs), *((name, ", until stop") for name in pairs[-1:])):
        samples = ratios(times, f"{kind}, async{until}", f"{kind}{until}")
        rows.append(Row(f"{_WHAT}: {kind}{until}, async / sync", samples, 1.0))
    return rows


def dump_idle(seconds: float) -> list[Row]:
    """Return a step that is not dumped as times of a plain one."""
    with tempfile.TemporaryDirectory() as scratch:
        path, training = Path(scratch), _training()
        dump = StatsDump({"dump_path": scratch, "level": "mix", "step": [0]})
        times = take_turns({"plain": _step(path, None, training), "idle": _step(path, dump, training)}, seconds)
    return [Row(f"{_WHAT}: idle / plain", ratios(times, "idle", "plain"), 1.01)]


def dump_by_msprobe(seconds: float, name: str) -> list[Row]:
    """Return a step that msprobe dumps, by our configuration of that name, as times of a plain one."""
    what = f"{_WHAT}: {name} by msprobe / plain"
    if importlib.util.find_spec("msprobe") is None:
        return [Row(what, [])]
    from msprobe.pytorch import PrecisionDebugger

    with tempfile.TemporaryDirectory() as scratch:
        path, config = Path(scratch) / "dump", Path(scratch) / "config.json"
        task = {"task": "statistics", **_CONFIGS[name]}
        options = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
        config.write_text(json.dumps({**task, "dump_path": str(path), "rank": [], "step": [], task["task"]: options}))
        debugger = PrecisionDebugger(config_path=str(config))
        steps = {"plain": _step(path, None, _training()), "msprobe": _step(path, debugger, _training())}
        times = take_turns(steps, seconds)
    return [Row(what, ratios(times, "msprobe", "plain"))]


def _saving(path: Path) -> Variant:
    """Return what does nothing but save the tensors of a dumped step, as many files as there are."""
    training = _training()
    with StatsDump({"dump_path": str(path), **_TENSORS}, model=training.model) as dump:
        training.forward_and_backward()
    dump.step()
    tensors = [torch.load(file) for file in path.rglob("*.pt")]

    def run(_: int) -> tuple[float, float]:
        started = time.perf_counter()
        for number, tensor in enumerate(tensors):
            torch.save(tensor, path / f"{number}.pt")
        ended = time.perf_counter()
        for number in range(len(tensors)):
            (path / f"{number}.pt").unlink()
        return started, ended

    return run


class _Training(NamedTuple):
    tokens: torch.Tensor
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def forward_and_backward(self) -> None:
        self.model(self.tokens).square().mean().backward()


def _training() -> _Training:
    """Return a new model and what it is trained with."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True)
    model = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return _Training(torch.randn(_SEQUENCES, _LENGTH, _WIDTH), model, optimizer)


def _step(path: Path, dump: Any, training: _Training, until_stop: bool = False) -> Variant:
    """Return a step, which ``dump`` dumps below ``path`` if it is not None."""

    def run(_: int) -> tuple[float, float]:
        started = time.perf_counter()
        if dump is not None:
            dump.start(model=training.model)
        training.forward_and_backward()
        backward_ended = time.perf_counter()
        if dump is not None:
            dump.stop()
        training.optimizer.step()
        training.optimizer.zero_grad()
        if dump is not None:
            dump.step()
        ended = time.perf_counter()
        for step in path.glob("step*"):
            shutil.rmtree(step)
        return started, backward_ended if until_stop else ended

    return run
