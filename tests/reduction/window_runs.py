"""The functions that run on the ranks of `test_window`."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpstats
from ddpstats import All, Any as AnyFlag, Max, Mean, Min, StatsWindow, Sum
from ddpstats.errors import ConfigError, DdpstatsError
from ddpstats.testing import count_collectives
from tests.reduction.off_host import tensors_off_host

t = torch.tensor


def stats_of_a_step(loss: torch.Tensor, step: int = 0) -> dict[str, Any]:
    """All kinds of leaves, on the device of ``loss``."""
    return {
        "loss": loss.detach(),
        "parts": [loss.detach() * 2, loss.detach().half(), 3.0],
        "by token": Mean(loss.detach(), weight=(loss.detach() > -1).sum()),
        "by host": Mean(loss.detach(), weight=128 + step),
        "tokens": Sum((loss.detach() > -1).sum()),
        "grad": {"max": Max(loss.detach()), "min": Min(loss.detach()[None])},
        "overflow": AnyFlag(loss.detach() > 1e9),
        "finite": All(loss.detach().isfinite()),
        "none": None,
    }


def make_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)


def training_step(device: str) -> Callable[[StatsWindow, int, Any], None]:
    """A whole training step, with adds of every kind."""
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, weights = torch.ones(3, 4, device=device), torch.ones(3, device=device)

    def step(window: StatsWindow, number: int, weight: Any) -> None:
        with window.timed("step"):
            losses = model(inputs).square().mean(1)
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        window.add({"loss": losses.mean(), "largest": losses.max()}, weight)
        window.add(stats_of_a_step(losses.mean(), number), weight)
        window.add({"sample": losses, "loss": losses.mean().detach()}, weights)

    return step


def train(window: StatsWindow, device: str, weight: Any = 8.0) -> None:
    step = training_step(device)
    for number in range(3):
        step(window, number, weight)


def counted() -> Any:
    """Count the collectives of adds, by c10d, and of flushes, by the window."""
    counts: dict[str, Any] = {"add": 0, "flush": [], "with a minimum": []}
    window = StatsWindow(name="counted")
    for extra, what in (({}, "flush"), ({"low": Min(1.0)}, "with a minimum")):
        for _ in range(4):
            with count_collectives() as seen:
                for step in range(50):
                    window.add({"loss": t([float(step)]), **extra}, weight=2)
            counts["add"] += seen.total
            before = window.counters
            window.flush()
            counts[what].append(window.counters.collectives - before.collectives)
    window.close()
    return counts


def uneven() -> Any:
    """Add on rank 0 alone, then on rank 1 alone, then on no rank."""
    window, results = StatsWindow(name="uneven"), []
    for adder in (0, 1, None):
        if dist.get_rank() == adder:
            window.add({"a": [1.0, 2.0]}, weight=3)
            window.add({"a": [5.0]}, weight=1)
        reduced = window.flush()
        results.append((reduced.values, reduced.weights, reduced.present_ranks, reduced.total_weight))
    window.close()
    return results


def faults() -> list[Any]:
    """Return the result or error of each flush; the window goes on working."""
    results: list[Any] = []
    first = dist.get_rank() == 0
    window = StatsWindow(name="faults")
    for value in (
        Sum(1.0) if first else 2.0,  # ranks hold two reduce ops
        t(2e200, dtype=torch.float64) if first else 1.0,  # too large, as only a device knows
    ):
        for _ in range(2):
            with tensors_off_host():
                window.add({"a": value, "b": 1.0})
        try:
            results.append(window.flush().values)
        except DdpstatsError as error:
            results.append((type(error).__name__, str(error), error.path, error.ranks))
        results.append(window.adds)
    window.add({"a": 4.0})
    results.append(window.flush().values)
    return results


def out_of_step() -> tuple[str, int]:
    """Flush on rank 0 while rank 1 reduces."""
    window = StatsWindow(name="x")
    window.add({"a": 1.0})
    try:
        if dist.get_rank() == 0:
            window.flush()
        else:
            ddpstats.reduce_stats({"a": 1.0}, name="x")
    except DdpstatsError as error:
        return f"{type(error).__name__}: {error}", window.adds
    return "no error", window.adds


def closed() -> list[str]:
    """Flush a window whose group is gone: an error before anything is sent, and the window keeps its adds."""
    group: Any = dist.new_group()
    window = StatsWindow(group=group, name="gone")
    window.add({"a": 1.0})
    kept = weakref.ref(group)
    dist.barrier()  # the other rank, too, has made the group
    dist.destroy_process_group(group)
    del group
    gc.collect()
    texts = ["group is kept" if kept() is not None else "group is gone"]
    try:
        window.flush()
    except ConfigError as error:
        texts.append(str(error))
    texts.append(str(window.adds))
    window.close()
    return texts


def threads() -> Any:
    """Add in four threads of each rank."""
    window = StatsWindow(name="threads")

    def add(number: int) -> None:
        for _ in range(500):
            window.add({"n": 1.0, "sum": Sum(float(number))} if number % 2 else {"n": t([1.0])}, weight=1)

    adders = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in adders:
        thread.start()
    for thread in adders:
        thread.join(60)
    reduced = window.flush()
    return reduced.values, reduced.weights


class Marked(torch.autograd.Function):
    """A function whose node in the graph holds an object, so that the end of the graph can be seen."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mark: Any) -> torch.Tensor:
        ctx.mark = mark
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> Any:
        return grad[0], None


def traces() -> Any:
    """Return what a window leaves behind in torch's state, in threads and of the graph."""
    state = torch.get_rng_state()
    weight = torch.ones(2, requires_grad=True)
    mark = nn.Module()  # any object that takes a weak reference
    kept = weakref.ref(mark)
    with StatsWindow(name="traces") as window:
        output: torch.Tensor = Marked.apply(weight.sum(), mark)  # type: ignore[no-untyped-call]
        for _ in range(3):
            window.add({"loss": output})
            window.add({f"k{i}": output.reshape(1) for i in range(200)})
            window.add({"loss": output, "more": [output.reshape(1), Sum(output)]}, weight=output)
        alive = kept() is not None
        del output, mark
        gc.collect()
        gone = kept() is None
        window.flush()
    worker = any(thread.name == "ddpstats" for thread in threading.enumerate())
    return alive, gone, weight.grad is None, bool(torch.equal(state, torch.get_rng_state())), worker


def by_rank() -> tuple[Any, ...]:
    """Flush with each rank's own values, then without; then where one rank alone asks for them."""
    rank = dist.get_rank()
    with StatsWindow(name="by rank") as window:
        for step in range(3):
            stats: dict[str, Any] = {"loss": float(rank + step), "hot": AnyFlag(step == 2 and rank == 1)}
            if rank == 1:
                stats["own"] = [Mean(1e200, weight=4.0), math.nan]
            window.add(stats, weight=1.0 + step)
        reduced = window.flush(per_rank=True)
        window.add({"loss": 1.0})
        plain = window.flush()
        window.add({"loss": 1.0})
        try:
            window.flush(per_rank=rank == 0)
        except DdpstatsError as error:
            text = f"{type(error).__name__}: {error}"
        assert reduced.by_rank is not None
        values = {path: own.values for path, own in reduced.flat_by_rank().items()}
        return values, reduced.by_rank["loss"].max_rank, plain.by_rank, text
