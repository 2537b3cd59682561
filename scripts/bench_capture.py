"""Rows of `scripts/bench.py` on `NaNCapture`, `Sentinel` and `StepChecks`: DDP training steps with and without them.

Copies of one model take turns, each with its own DDP and optimizer: hooks stay on a model.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench_rows import Row, Variant, burst, ratios, size_for, take_turns, timed
from sentinel_rates import Transformer, logging_off, step_fn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import NaNCapture, Sentinel, StatsReducer, StatsWindow, StepChecks, collective_guard
from ddpstats.testing import count_collectives

Call = Callable[[], object]
Loss = Callable[[nn.Module, Any], Tensor]


def _step(
    module: nn.Module,
    loss_of: Loss,
    batch: Any,
    watches: Sequence[Any] = (),
    calls: Sequence[Call] = (),
    own_sec: list[tuple[float, float]] | None = None,
) -> Call:
    """Return a training step of one micro-batch, with ``calls`` before the optimizer's.

    ``own_sec`` gets the seconds to enter and leave micro-batches, and those of ``calls``.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        times = [time.perf_counter()]
        with contextlib.ExitStack() as micro_batch:
            for watch in watches:
                micro_batch.enter_context(watch.micro_batch(batch))
            times.append(time.perf_counter())
            loss_of(module, batch).backward()  # type: ignore[no-untyped-call]
            times.append(time.perf_counter())
        times.append(time.perf_counter())
        for call in calls:
            call()
        if own_sec is not None:
            own_sec.append((times[1] - times[0] + times[3] - times[2], time.perf_counter() - times[3]))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _square(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).square().mean()


def _variants(steps: dict[str, Call]) -> dict[str, Variant]:
    return {name: timed(lambda _, step=step: step()) for name, step in steps.items()}


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    return [1e3 * sample for sample in seconds]


# -- capture ----------------------------------------------------------------------------------------------------------


def capture(seconds: float, step_ms: int) -> list[Row]:
    """Return a step of some 60 parameters, with `NaNCapture.micro_batch` and `NaNCapture.check`."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 3, 32, 32), torch.zeros(size, dtype=torch.int64)

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    images = batch(size_for(1e-3 * step_ms, lambda size: _step(_convolutions(), loss, batch(size))))
    module, own_sec = _convolutions(), list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as scratch, NaNCapture(scratch, model=module) as capture:
        captured = _step(module, loss, images, [capture], [capture.check], own_sec)
        variants = _variants({"plain": _step(_convolutions(), loss, images), "capture": captured})
        times = take_turns(variants, seconds)
    what = f"NaN capture, a DDP step of {step_ms} ms and more"
    return [
        Row(f"{what} / plain", ratios(times, "capture", "plain"), 1.01),
        Row(f"{what}: plain", _milliseconds(times["plain"]), unit="ms"),
        Row(f"{what}: micro_batch and check", _milliseconds([micro + check for micro, check in own_sec]), unit="ms"),
    ]


def _convolutions() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), *[(16, 16)] * 5, (16, 32), *[(32, 32)] * 7):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10))
    return DistributedDataParallel(nn.Sequential(*layers, *head))


# -- sentinel ---------------------------------------------------------------------------------------------------------

_LENGTH = 64  # of sequences
_DIGEST_EVERY, _REPLAY_EVERY = 100, 1_000
_SENTINELS: dict[str, dict[str, Any]] = {
    "thresholds": {},
    "digests": {"digest_every_steps": 1},
    "batches kept": {"replay_every_steps": 10**9, "replay_fn": step_fn},
    "replay": {"replay_every_steps": 1, "replay_fn": step_fn},
    "window open": {"matmul_checksum": True},
}


def sentinel(seconds: float, step_ms: int) -> list[Row]:
    """Return a step under each layer as times of a plain step of a transformer with 25 norm layers.

    Layers 2 and 3 look at every step here, and their extra time is divided by how rarely they would. What layer 3 does
    in every step, keep the batch, is timed by itself: it is less than the noise of whole steps.
    """
    logging_off()
    tokens = _tokens(size_for(1e-3 * step_ms, lambda size: _step(_transformer(), step_fn, _tokens(size))))
    own_sec: dict[str, list[tuple[float, float]]] = {name: [] for name in _SENTINELS}
    steps, watches = {"plain": _step(_transformer(), step_fn, tokens)}, dict[str, Sentinel]()
    with contextlib.ExitStack() as stack:
        for name, options in _SENTINELS.items():
            module = _transformer()
            watch = watches[name] = stack.enter_context(Sentinel(module, mode=2, **options))
            steps[name] = _step(module, step_fn, tokens, [watch], [watch.step], own_sec[name])
        variants = _variants(steps)
        # For one step: the other variants take turns in this process.
        variants["window open"] = timed(lambda _: (watches["window open"].check_matmuls(1), steps["window open"]()))
        times = take_turns(variants, seconds)

    def extra(name: str, to: str, every: int, kept_sec: float = 0.0) -> list[float]:
        rounds = zip(times[name], times[to], times["plain"], strict=True)
        return [1 + (kept_sec + (a - b) / every) / plain for a, b, plain in rounds]

    micro_batch_sec = {name: statistics.median(micro for micro, _ in own_sec[name]) for name in own_sec}
    kept_sec = micro_batch_sec["batches kept"] - micro_batch_sec["thresholds"]
    replays = extra("replay", "batches kept", _REPLAY_EVERY, kept_sec)
    what = f"sentinel, a DDP step of {step_ms} ms and more"
    return [
        Row(f"{what}: plain", _milliseconds(times["plain"]), unit="ms"),
        Row(f"{what}: layer 1, 25 checkpoints / plain", ratios(times, "thresholds", "plain"), 1.01),
        Row(f"{what}: layer 2, every 100 steps / plain", extra("digests", "thresholds", _DIGEST_EVERY), 1.005),
        Row(f"{what}: layer 3, every 1,000 steps / plain", replays, 1.005),
        Row(f"{what}: layer 4, window open / plain", ratios(times, "window open", "plain"), 1.3),
    ]


def _transformer() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Transformer(width=256, blocks=12, heads=4))  # two norms a block, and one


def _tokens(sequences: int) -> Tensor:
    return torch.arange(sequences * (_LENGTH + 1)).reshape(sequences, -1) % 29


_EXAMS: dict[str, dict[str, Any]] = {
    "layer 2": {"digest_every_steps": 1},
    "layer 3": {"replay_every_steps": 1, "replay_fn": _square},
}


def sentinel_memory(seconds: float, layer: str) -> list[Row]:
    """Return by how much an exam raises the peak memory of this process, in bytes of the parameters. For one rank."""
    logging_off()
    width = 2048
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(16)))
    peaks = []
    for options in ({}, _EXAMS[layer]):
        with Sentinel(model, mode=2, **options) as sentinel:
            step = _step(model, _square, torch.randn(4, width), [sentinel], [sentinel.step])
            for _ in range(3):
                step()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    times = (peaks[1] - peaks[0]) / sum(parameter.nbytes for parameter in model.parameters())
    return [Row(f"sentinel, peak memory of an exam of {layer} / parameters", [times])]


# -- all checks together ----------------------------------------------------------------------------------------------

_LAYERS, _WIDTH = 24, 256
_TURN, _WARM = 5, 2  # steps of one turn, and those of them that are not timed
_EVERY = ("guard", "capture", "sentinel")
_STATS = {f"loss_{number}": torch.ones(1) for number in range(10)}


class _Checks(NamedTuple):
    """The checks of a step, whether in one call, and which call comes beside them."""

    parts: tuple[str, ...] = ()
    together: bool = False
    beside: str = ""


_CHECKS = {
    "plain": _Checks(),
    "bare": _Checks(beside="all_reduce"),
    "guard": _Checks(("guard",)),
    "capture": _Checks(("capture",)),
    "sentinel": _Checks(("sentinel",)),
    "apart": _Checks(_EVERY),
    "together": _Checks(_EVERY, together=True),
    "together, stats": _Checks(_EVERY, together=True, beside="reducer"),
    "together, window": _Checks(_EVERY, together=True, beside="window"),
}


def checks(seconds: float, step_ms: int) -> list[Row]:
    """Return a DDP step with checks as times of the plain one, and of one with a bare all_reduce of 8 bytes.

    On two busy cores each small collective waits for a time slice, whoever issues it: hence the latter.
    """
    size = size_for(1e-3 * step_ms, lambda size: _step(_linears(), _square, torch.randn(size, _WIDTH)))
    batch = torch.randn(size, _WIDTH)
    what = f"checks, a DDP step of {_LAYERS} layers"
    with contextlib.ExitStack() as stack:
        turns = {name: _turn(variant, batch, stack) for name, variant in _CHECKS.items()}
        times = take_turns(turns, seconds)
        rows = [Row(f"{what}: plain", _milliseconds(times["plain"]), unit="ms")]
        for to, limit in (("plain", 1.06), ("bare", 1.02)):
            for name in (name for name in times if name not in ("plain", to)):
                samples = ratios(times, name, to)
                rows.append(Row(f"{what}: {name} / {to}", samples, limit if name == "together, window" else None))
        for name, collectives in (("apart", None), ("together", 1)):
            with count_collectives() as seen:  # without DDP's own, which C++ issues
                turns[name](0)
            rows.append(Row(f"{what}: our collectives, {name}", [seen.total / _TURN], collectives, ""))
    return rows


def _turn(variant: _Checks, batch: Tensor, stack: contextlib.ExitStack) -> Variant:
    """Return a few steps; a guard is of the whole process, so it is entered and left around them."""
    module, scratch = _linears(), stack.enter_context(tempfile.TemporaryDirectory())
    makers: dict[str, Callable[[], Any]] = {
        "guard": lambda: collective_guard("step"),
        "capture": lambda: stack.enter_context(NaNCapture(scratch, model=module)),
        "sentinel": lambda: stack.enter_context(Sentinel(module, mode=2)),
    }
    checks = {part: makers[part]() for part in variant.parts}
    window = StatsWindow(name="bench")
    beside = {
        "all_reduce": functools.partial(dist.all_reduce, torch.zeros(1, dtype=torch.float64)),
        "reducer": functools.partial(StatsReducer(name="bench"), _STATS, len(batch)),
        "window": functools.partial(window.add, _STATS, len(batch)),
    }
    own_calls = [check.check if part == "capture" else check.step for part, check in checks.items()]
    calls = [StepChecks(**checks).step] if variant.together else own_calls
    calls += [call for name, call in beside.items() if name == variant.beside]
    step = _step(module, _square, batch, [check for part, check in checks.items() if part != "guard"], calls)

    def turn(_: int) -> tuple[float, float]:
        with checks.get("guard", contextlib.nullcontext()):
            interval = burst(step, _TURN, _WARM)
        if variant.beside == "window":
            window.flush()  # outside of the clock
        return interval

    return turn


def _linears() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [part for _ in range(_LAYERS) for part in (nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers))
