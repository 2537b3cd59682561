"""Reductions, guard, capture, sentinel, dumps and windows on one device: what the tests of this folder run on ranks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpstats
from ddpstats import (
    CollectiveMismatch,
    Max,
    NaNCapture,
    Sentinel,
    SentinelAlarm,
    StatsWindow,
    StepChecks,
    collective_guard,
)
from ddpstats.dump import StatsDump
from ddpstats.testing import BitFlip, inject_bit_flips
from tests import training
from tests.dump import collecting
from tests.gpu import accelerator
from tests.interference import runs as interference
from tests.reduction import reduce_pairs, window_runs
from tests.sentinel import products
from tests.training import Batch, Hooks, loss_of

t = torch.tensor


def mine(*by_rank: Any) -> Any:
    return by_rank[dist.get_rank()]


# -- reductions -------------------------------------------------------------------------------------------------------


def reduced(device: str, dtype: torch.dtype, mixed: bool) -> Any:
    """``mixed``: rank 1 holds its stats on the host."""
    where = "cpu" if mixed and dist.get_rank() == 1 else device
    stats = {
        "loss": t(mine(1.0, 2.0), dtype=dtype, device=where),
        "count": t([mine(2, 4)], device=where),
        "host": mine(3.0, 5.0),
        "largest": Max(t(mine(0.5, 0.25), device=where)),
        **mine({}, {"only": t(-1.5, device=where)}),
    }
    return ddpstats.reduce_stats(stats, weight=t([2.0], device=where)).values


def averaged(device: str, dtype: torch.dtype) -> Any:
    stats = {"a": t([1.0, 2.0], dtype=dtype, device=device), **mine({}, {"b": t([4.0, 4.0], device=device)})}
    averages, total = ddpstats.recursive_average(stats, t([1.0, 3.0], device=device), True)
    facts = {key: (value.item(), str(value.dtype), value.device.type) for key, value in averages.items()}
    return facts, total.item(), total.device.type


def without_waiting(device: str) -> Any:
    """Count the copies of calls that may not wait for the device: the host asks it whether the one copy has arrived."""
    reducer = ddpstats.StatsReducer()
    dtypes = [torch.float32, torch.half] * 4
    stats = {f"loss_{i}": t(float(i), device=device, dtype=dtype) for i, dtype in enumerate(dtypes)}
    for _ in range(2):  # what is set up the first time may wait
        reducer(stats)
    with accelerator.no_waits(device):
        values = reducer(stats).values
    is_noticed = accelerator.is_noticed(device, stats["loss_0"].item)
    copies = accelerator.copies_to_host(device, lambda: reducer(stats))
    reducer.close()
    return list(values.values()), is_noticed, copies


def reduced_as_drawn(device: str, seeds: range) -> Any:
    with torch.device(device):
        return reduce_pairs.on_this_rank(seeds, "on the device")


def windows(device: str, nonfinite: Any, kind: str) -> list[dict[str, Any]]:
    """Return the figures of a window of the CPU, and of one whose values are on the device."""
    figures = []
    for at in ("cpu", device):
        weights = {"number": 8.0, "scalar": t(8.0, device=at), "vector": torch.ones(3, device=at)}
        with StatsWindow(nonfinite=nonfinite) as window:
            window_runs.train(window, at, weights[kind])
            flat = window.flush().flat()
        figures.append({name: value for name, value in flat.items() if not name.startswith("time/")})
    return figures


def adds_without_waiting(device: str, kind: str) -> tuple[bool, float, float]:
    weight = 8.0 if kind == "number" else t(8.0, device=device)
    step, window = window_runs.training_step(device), StatsWindow(nonfinite="skip")
    for number in range(2):  # what is set up the first time may wait
        step(window, number, weight)
    window.flush()
    with accelerator.no_waits(device):
        for number in range(50):
            step(window, number, weight)
    is_noticed = accelerator.is_noticed(device, torch.ones((), device=device).item)
    reduced = window.flush()
    return is_noticed, reduced.weights["tokens"], reduced.values["time"]["step"]


def adds_on_two_streams(device: str) -> set[float]:
    second_stream, window = torch.Stream(device), StatsWindow()
    for number in range(200):
        with second_stream if number % 2 else contextlib.nullcontext():
            window.add({f"k{i}": torch.full((), float(number), device=device) for i in range(20)}, weight=2)
    torch.accelerator.synchronize()
    return set(window.flush().values.values())


# -- the guard --------------------------------------------------------------------------------------------------------


def guarded(device: str, dtype: torch.dtype) -> Any:
    """Equal collectives first, then ones that differ in shape."""
    with collective_guard("strict") as guard:
        value = torch.ones(3, dtype=dtype, device=device)
        dist.all_reduce(value)
        dist.broadcast(value, 0)
        seen = guard.counters.collectives
        try:
            dist.all_reduce(torch.ones(mine(3, 4), dtype=dtype, device=device))
        except CollectiveMismatch as error:
            return value.tolist(), seen, str(error)
    return value.tolist(), seen, "no error"


# -- capture, sentinel, and both with the guard ------------------------------------------------------------------------


def make_model(device: str) -> DistributedDataParallel:
    return DistributedDataParallel(training.make_model().to(device))


def batch_of(device: str, dtype: torch.dtype, step: int) -> Batch:
    return {name: tensor.to(device, dtype) for name, tensor in training.batch_of(step).items()}


def captured(device: str, dtype: torch.dtype, dirpath: str) -> Any:
    """Train under autocast and a GradScaler; rank 1's batch of step 1 has a NaN."""
    ddp = make_model(device)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    steps = []
    with NaNCapture(
        dirpath, model=ddp, optimizer=optimizer, scaler=scaler, max_scaler_skips=1, on_nonfinite="skip"
    ) as capture:
        for step in range(3):
            batch = batch_of(device, torch.float32, step)
            if step == 1 and dist.get_rank() == 1:
                batch["x"][0, 0] = torch.nan
            with capture.micro_batch(batch):
                with torch.autocast(device, dtype=dtype):
                    loss = loss_of(ddp, batch)
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            verdict = capture.check()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            files = sorted(file.name for file in Path(verdict.bundle).iterdir()) if verdict.bundle else []
            steps.append((verdict.kind, verdict.culprit_ranks, files))
    return steps, all(bool(parameter.isfinite().all()) for parameter in ddp.parameters())


def watched(device: str, dtype: torch.dtype, flips: list[BitFlip]) -> Any:
    """Return what `Sentinel` raises in each of three steps."""
    ddp = DistributedDataParallel(training.make_model().to(device, dtype))
    alarms: list[str] = []
    with Sentinel(ddp, mode=2, digest_every_steps=1) as sentinel, inject_bit_flips(ddp, flips) as faults:

        def judge(step: int) -> bool:
            try:
                sentinel.step()
                alarms.append("")
            except SentinelAlarm as alarm:
                alarms.append(str(alarm))
            return not alarms[-1]

        hooks = Hooks(judge=judge, after_step=lambda step: faults.step())
        training.train(ddp, batch_of=lambda step, micro: batch_of(device, dtype, step), hooks=hooks)
    return alarms


def judged(device: str, dirpath: str, together: bool) -> Any:
    """Return whether all is well in steps under all checks, in one call or three, and how often each waits."""
    ddp = make_model(device)
    are_ok: list[bool] = []
    waits: list[int] = []
    with (
        NaNCapture(dirpath, model=ddp) as capture,
        Sentinel(ddp, mode=2) as sentinel,
        collective_guard("step") as guard,
    ):
        checks = StepChecks(capture=capture, sentinel=sentinel, guard=guard)

        @contextlib.contextmanager
        def micro_batch(batch: Batch) -> Iterator[None]:
            with capture.micro_batch(batch), sentinel.micro_batch(batch):
                yield

        def judge(step: int) -> bool:
            with accelerator.count_waits(device) as counted:
                if together:
                    are_ok.append(checks.step().ok)
                else:
                    guard.step()
                    are_ok.append(capture.check().ok and sentinel.step().ok)
            waits.extend(counted)
            return False

        hooks = Hooks(micro_batch, judge=judge)
        training.train(ddp, batch_of=lambda step, micro: batch_of(device, torch.float32, step), hooks=hooks)
    return are_ok, waits[1:]  # the first step agrees on settings, and sets up what the device needs


def trained_under_everything(
    device: str, name: str, steps: int, dirpath: str, disturb: Callable[..., None] | None = None
) -> interference.Comparison:
    """Compare a program that trains with all of ddpstats switched on with the plain program."""
    interference.set_backend("eager")
    torch.set_default_device(device)
    try:
        return interference.compared(name, steps, dirpath, disturb)
    finally:
        torch.set_default_device(None)


def wrong_products(device: str, dtype: torch.dtype, precision: str) -> tuple[list[str], int]:
    """Multiply random matrices; return the right products that are called wrong, and how many of 60 flips are found."""
    torch.set_float32_matmul_precision(precision)
    try:
        return _wrong_products(device, dtype)
    finally:
        torch.set_float32_matmul_precision("highest")


def _wrong_products(device: str, dtype: torch.dtype) -> tuple[list[str], int]:
    draw = random.Random(0)
    accused, caught = [], 0
    for seed in range(60):
        m, k, n = (draw.choice([1, 3, 8, 17, 64, 96, 257, 1024]) for _ in range(3))
        generator = torch.Generator().manual_seed(seed)
        left, right = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((m, k), (k, n)))
        if seed % 3 == 0:
            left, right = left.abs(), right.abs() * 0.01
        product = products.product_of(left, right)
        accused += [f"seed {seed}: {fault}" for fault in products.faults_of(product)]
        largest = int(product.result.abs().argmax())
        products.flip(product.result, largest, 8 * dtype.itemsize - 1)
        caught += len(products.faults_of(product)) == 1
    return accused, caught


def bundle_of_a_nan(device: str, dtype: torch.dtype, dirpath: str) -> str:
    """Capture a NaN of a model with dropout under autocast; return the bundle."""
    model = training.make_model().to(device)
    with NaNCapture(dirpath, model=model) as capture:
        batch = batch_of(device, torch.float32, 0)
        batch["x"][0, 0] = torch.nan
        with capture.micro_batch(batch), torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        return str(capture.check().bundle)


# -- one rank, and its backend ----------------------------------------------------------------------------------------


def alone(device: str, dirpath: str) -> Any:
    """Run all of it in a group of one rank, whose backend knows tensors of this device only."""
    value = torch.ones(2, device=device)
    with collective_guard("strict") as guard:
        dist.all_reduce(value)
        seen = guard.counters.collectives
    return {
        "backend": dist.get_backend(),
        "all_reduce": (value.tolist(), seen),
        "stats": ddpstats.reduce_stats({"a": t(2.0, device=device)}, weight=4).values,
        "decision": ddpstats.any_rank(True),
        "capture": [kind for kind, *_ in captured(device, torch.bfloat16, dirpath)[0]],
        "sentinel": watched(device, torch.float32, []),
    }


# -- dumps ------------------------------------------------------------------------------------------------------------


def dump_without_waiting(device: str, dirpath: str) -> bool:
    """Return whether all statistics of a layer are there."""
    model = collecting.make_model().to(device)
    x = torch.randn(3, 4, device=device)
    model(x).square().sum().backward()  # what a device sets up the first time may wait
    dump = StatsDump({"dump_path": dirpath, "level": "mix", "async_dump": True}, model=model)
    with accelerator.no_waits(device):
        dump.start()
        model(x).square().sum().backward()
    dump.step()
    entry = collecting.data(Path(dirpath), rank="rank0")["Functional.linear.3.forward"]
    return all(leaf["Max"] is not None for leaf in collecting.leaves(entry))


def dumped(device: str, dirpath: str, is_async: bool) -> tuple[dict[str, Any], set[Any], int | None]:
    """Return the means of all entries, their streams, and the stream that the program computes on."""
    model, x = collecting.make_model().to(device), torch.ones(3, 4, device=device)
    model.eval()  # generators of devices draw other numbers
    dump = StatsDump({"dump_path": dirpath, "level": "mix", "async_dump": is_async}, model=model)
    dump.start()
    model(x).square().sum().backward()
    dump.step()
    entries = collecting.data(Path(dirpath), rank="rank0")
    leaves = {name: list(collecting.leaves(entry)) for name, entry in entries.items()}
    means = {name: [leaf["Mean"] for leaf in entry] for name, entry in leaves.items()}
    streams = {leaf["stream"] for entry in leaves.values() for leaf in entry}
    return means, streams, None if device == "cpu" else torch.accelerator.current_stream().stream_id


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer with a parameter of one element, which is an empty shard on every rank but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.scale
        return out


def sharded(device: str, dirpath: str) -> list[bool]:
    """Return whether capture and guard found each of three steps right; in the second, rank 1 has a NaN."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # a second of imports

    torch.manual_seed(0)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model: Any = nn.Sequential(Scaled(), Scaled()).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer, are_ok = torch.optim.SGD(model.parameters(), lr=0.1), []
    with NaNCapture(dirpath, model=model, on_nonfinite="skip") as capture, collective_guard("step") as guard:
        checks = StepChecks(capture=capture, guard=guard)
        for step in range(3):
            x = torch.ones(4, 8, device=device)
            if step == 1 and dist.get_rank() == 1:
                x[0, 0] = torch.nan
            with capture.micro_batch({"x": x}):
                model(x).float().square().mean().backward()
            are_ok.append(checks.step().ok)
            if are_ok[-1]:
                optimizer.step()
            optimizer.zero_grad()
    return are_ok
