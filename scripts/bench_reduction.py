"""Rows of `scripts/bench.py` on reductions and windows: time, payload, memory, and what an import costs.

Every variant's result is checked before a clock starts. "Per leaf" is espnet's own `recursive_average`, one all_gather
for each leaf; "bare" is one all_reduce of as many float64 as our buffer has, on a separate gloo group.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_rows import Row, Variant, ratios, take_turns, timed

import ddpstats
from ddpstats import Max, Mean, StatsReducer, StatsWindow, Sum

_PER_LEAF_LIMITS = {10: 7.0, 50: 28.0, 1_000: 200.0}
_BARE_LIMITS = {10: (1.2, 1.2), 50: (1.3, 1.3), 1_000: (1.7, 1.7), 100_000: (15.0, 40.0)}
"""Of floats, of tensors."""
_ALL_VARIANTS_UP_TO = 1_000  # one collective per leaf takes minutes at 100,000 keys
_DICTS = 2  # as many different dicts take turns, so that no call gets the very objects of the last one
_TOLERANCE = 1e-5  # espnet and the drop-in compute and return float32
_ADDS = 50
_ADDED_TENSORS = 20_000  # in one burst

Average = Callable[[Any], Mapping[str, Any]]
Call = Callable[[int], Any]
"""Takes the number of the round."""


def _key(index: int) -> str:
    return f"loss_{index:05d}"


def _value(rank: int, number: int, index: int) -> float:
    return index % 13 + rank + number % _DICTS / 8


def _weight(rank: int) -> float:
    return 8.0 * (rank + 1)


def _tensor(value: float) -> torch.Tensor:
    return torch.tensor([value])


_LEAVES: dict[str, Callable[[float], Any]] = {"floats": float, "tensors": _tensor}


def reduction(seconds: float, keys: int) -> list[Row]:
    """Return ratios to a bare all_reduce and to one collective per leaf, on fresh ranks.

    A group's buffer has the size of the largest layout that the group has seen, hence the fresh ranks.
    """
    reducer, weight = StatsReducer(), _weight(dist.get_rank())
    alternating, by_rank = StatsReducer(name="alternating"), StatsReducer(name="per rank", per_rank=True)

    def read_by_rank(stats: Any) -> Mapping[str, Any]:
        reduced = by_rank(stats, weight)
        assert reduced.by_rank
        return reduced.values

    calls = {leaves: checked(lambda stats: reducer(stats, weight).values, keys, _LEAVES[leaves]) for leaves in _LEAVES}
    bare_limits = _BARE_LIMITS.get(keys, (None, None))
    pairs = [(f"{leaves} / bare all_reduce", leaves, "bare", bare_limits[leaves == "tensors"]) for leaves in _LEAVES]
    if keys <= _ALL_VARIANTS_UP_TO:
        for leaves, make in _LEAVES.items():
            calls[f"alternating {leaves}"] = checked(lambda stats: alternating(stats, weight).values, keys, make, True)
            pairs.append((f"{leaves}, alternating / same keys", f"alternating {leaves}", leaves, 1.1))
        calls["per rank"] = checked(read_by_rank, keys, float)
        pairs.append(("floats, per_rank / without", "per rank", "floats", None))
    payload_bytes = _payload_bytes(reducer, calls["floats"])
    calls["bare"] = _bare_all_reduce(payload_bytes // 8)
    times = take_turns({name: timed(call) for name, call in calls.items()}, seconds)
    world_size = dist.get_world_size()
    what, is_limited = f"{world_size} ranks, {keys:,} keys", world_size == 2
    rows = [Row(f"{what}: {pair}", ratios(times, a, b), limit if is_limited else None) for pair, a, b, limit in pairs]
    if keys <= _ALL_VARIANTS_UP_TO:
        rows += _per_leaf(what, seconds, keys, calls["tensors"], _PER_LEAF_LIMITS.get(keys) if is_limited else None)
    return [*rows, Row(f"{what}: payload of a path", [payload_bytes / keys], 64.0, "bytes")]


def _per_leaf(what: str, seconds: float, keys: int, tensors: Call, limit: float | None) -> list[Row]:
    weight = _weight(dist.get_rank())
    weight_tensor = torch.tensor([weight])

    def averaging(average: Callable[..., Any]) -> Call:
        return checked(lambda stats: average(stats, weight_tensor, True)[0], keys, _tensor)

    calls = {
        "tensors": tensors,
        "reduce_stats": checked(lambda stats: ddpstats.reduce_stats(stats, weight).values, keys, _tensor),
        "drop-in": averaging(ddpstats.recursive_average),
    }
    is_installed = importlib.util.find_spec("espnet2") is not None
    if is_installed:
        calls["espnet"] = averaging(importlib.import_module("espnet2.torch_utils.recursive_op").recursive_average)
    times = take_turns({name: timed(call) for name, call in calls.items()}, seconds)
    rows = []
    for name in ("tensors", "reduce_stats", "drop-in"):
        samples = ratios(times, "espnet", name) if is_installed else []
        rows.append(Row(f"{what}: {name}, faster than per leaf", samples, limit, at_least=True))
    return rows


def checked(average: Average, keys: int, make: Callable[[float], Any], alternates: bool = False) -> Call:
    """Return a call to time, which averages this rank's stats of a round. Collective: its results are compared first.

    With ``alternates`` a rank holds one half of the keys, and the other half in the next round.
    """

    def held(rank: int, number: int) -> range:
        if not alternates:
            return range(keys)
        return range(keys // 2) if (rank + number) % 2 else range(keys // 2, keys)

    def expected(number: int) -> dict[str, float]:
        sums, weights = Counter[str](), Counter[str]()
        for rank in range(dist.get_world_size()):
            for index in held(rank, number):
                sums[_key(index)] += _weight(rank) * _value(rank, number, index)
                weights[_key(index)] += _weight(rank)
        return {key: sums[key] / weights[key] for key in sums}

    rank = dist.get_rank()
    dicts = [{_key(i): make(_value(rank, number, i)) for i in held(rank, number)} for number in range(_DICTS)]
    for number in (*range(_DICTS), 0):  # the first once more: with warm caches, as it is when timed
        averages = {key: float(value) for key, value in average(dicts[number]).items()}
        if averages != pytest.approx(expected(number), rel=_TOLERANCE):
            raise RuntimeError("a result is wrong, so its time means nothing")
    return lambda number: average(dicts[number % _DICTS])


def _payload_bytes(reducer: StatsReducer, call: Call) -> int:
    """Return the bytes of one steady call."""
    before = reducer.counters
    call(0)
    after = reducer.counters
    assert after.renegotiations == before.renegotiations, "a steady call renegotiated"
    return after.payload_bytes - before.payload_bytes


def _bare_all_reduce(lanes: int) -> Call:
    group: Any = dist.new_group(backend="gloo", group_desc="bench")
    options: Any = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=60)
    buffer = torch.zeros(lanes, dtype=torch.float64)
    return lambda number: group.allreduce([buffer], options).wait()


def new_keys(seconds: float, keys: int) -> list[Row]:
    """Return milliseconds of calls of which each has keys that no rank has used before."""
    reducer, milliseconds = StatsReducer(name="new keys"), []
    for number in range(1_000 if seconds else 4):
        stats = {f"step_{number}/{_key(index)}": float(index) for index in range(keys)}
        dist.barrier()
        started = time.perf_counter()
        values = reducer(stats, 8.0).values
        milliseconds.append(1e3 * (time.perf_counter() - started))
        assert values == stats
    return [Row(f"2 ranks, calls with new keys: {keys} in each", milliseconds, unit="ms")]


# -- memory and import ------------------------------------------------------------------------------------------------


def memory(seconds: float, keys: int) -> list[Row]:
    """Return the bytes a path that reductions take beside stats and result. On fresh ranks.

    `tracemalloc` sees what Python allocates, the group's buffer with it; torch's temporaries are counted by torch's
    profiler as if all of a call were alive at its peak. gloo's own memory is in neither.
    """
    reducer, stats = StatsReducer(), {_key(index): index % 13 + 0.5 for index in range(keys)}
    StatsReducer(name="warm-up")({"loss": 1.0}, 8.0)  # lazy imports and the connection are no matter of paths
    gc.collect()
    # Tracing goes on until the rank ends: `tracemalloc.stop` beside a gloo thread crashes CPython (gh-128679).
    tracemalloc.start()
    peaks = [_peak_beside_result(reducer, stats) for _ in range(3)]
    with torch.profiler.profile(profile_memory=True) as profile:
        reducer(stats, 8.0)
    events: Any = profile.events() or ()
    temporaries = sum(max(0, event.self_cpu_memory_usage) for event in events)
    what = f"memory of a path, {keys:,} floats"
    return [
        Row(f"{what}: first call, peak beside the result", [peaks[0] / keys], 600.0, "bytes"),
        Row(f"{what}: steady call, peak beside the result", [(peaks[-1] + temporaries) / keys], 64.0, "bytes"),
    ]


def _peak_beside_result(reducer: StatsReducer, stats: dict[str, float]) -> int:
    gc.collect()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    reduced: Any = reducer(stats, 8.0)
    _, peak = tracemalloc.get_traced_memory()
    gc.collect()
    with_result, _ = tracemalloc.get_traced_memory()
    assert len(reduced.values) == len(stats)
    del reduced
    return peak - before - (with_result - tracemalloc.get_traced_memory()[0])


def imports(seconds: float) -> list[Row]:
    """Return milliseconds that ``import ddpstats`` adds to a bare interpreter. For one rank."""

    def python(code: str) -> Variant:
        command, root = [sys.executable, "-c", code], Path(__file__).resolve().parents[1]
        return timed(lambda _: subprocess.run(command, cwd=root, check=True, timeout=60))

    times = take_turns({"import": python("import ddpstats"), "bare": python("pass")}, seconds)
    added_sec = statistics.median(times["import"]) - statistics.median(times["bare"])
    return [Row("import ddpstats, beyond a bare interpreter", [1e3 * added_sec], 50.0, "ms")]


# -- windows ----------------------------------------------------------------------------------------------------------


def window_add(seconds: float, keys: int) -> list[Row]:
    """Return processor time of an add as times of ``float(value)`` of as many tensors. For one rank."""
    window, marking = StatsWindow(), StatsWindow(name="marked")
    stats = {_key(index): torch.tensor([float(index)]) for index in range(keys)}
    markers = (Sum, lambda value: Max(value.item()), Mean, lambda value: value)
    marked = {name: markers[index % 4](value) for index, (name, value) in enumerate(stats.items())}

    def bursts(call: Callable[[], object]) -> Variant:
        count = max(1, _ADDED_TENSORS // keys)

        def run(_: int) -> tuple[float, float]:
            started = time.process_time()
            for _ in range(count):
                call()
            return 0.0, (time.process_time() - started) / count

        return run

    variants = {
        "tensors": bursts(lambda: window.add(stats, 8.0)),
        "leaves, most of them marked": bursts(lambda: marking.add(marked, 8.0)),
        "float": bursts(lambda: [float(value) for value in stats.values()]),
    }
    times = take_turns(variants, seconds)
    assert window.flush().values == {name: value.item() for name, value in stats.items()}
    return [
        Row(f"window, add of {keys:,} {leaves} / float() of as many", ratios(times, leaves, "float"), 2.5)
        for leaves in ("tensors", "leaves, most of them marked")
    ]


def window_flush(seconds: float, keys: int) -> list[Row]:
    """Return the time of 50 adds and a flush as times of 50 reductions."""
    window, reducer = StatsWindow(), StatsReducer()
    stats = {_key(index): torch.tensor([float(index)]) for index in range(keys)}

    def windowed(_: int) -> object:
        for _ in range(_ADDS):
            window.add(stats, 8.0)
        return window.flush()

    def reduced(_: int) -> None:
        for _ in range(_ADDS):
            reducer(stats, 8.0)

    times = take_turns({"window": timed(windowed), "reduce": timed(reduced)}, seconds)
    what = f"window, {_ADDS} adds of {keys:,} tensors and a flush / {_ADDS} reductions"
    return [Row(what, ratios(times, "window", "reduce"), 0.05)]
