"""What is counted rather than timed: payload, memory, and what an import costs."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _bench_loop import Spread
from bench_reduction import key, payload_of

from ddpstats import StatsReducer
from ddpstats.testing import ThreadGroup

# -- payload ----------------------------------------------------------------------------------------------------------


def payloads(key_counts: Sequence[int]) -> list[int]:
    """Bytes per steady call on this rank, for each number of keys on a group of its own. Collective."""
    return [_payload(StatsReducer(group=dist.new_group(backend="gloo")), keys) for keys in key_counts]


def payload_on_thread(group: ThreadGroup, keys: int) -> int:
    """The same where ranks are threads; every `run_threads` is a group of its own."""
    return _payload(group.reducer(), keys)


def _payload(reducer: StatsReducer, keys: int) -> int:
    stats = {key(index): 1.0 for index in range(keys)}
    return payload_of(reducer, lambda: reducer(stats, 8.0))


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, beside the stats that were passed in. Peaks are beside the result, too."""

    first_peak_bytes: int
    steady_peak_bytes: int
    steady_torch_bytes: int
    retained_bytes: int
    result_bytes: int


def memory(keys: int) -> Memory:
    """What reductions of ``keys`` floats take. Collective, on fresh ranks.

    `tracemalloc` sees what Python allocates, the group's buffer (a bytearray) with it, but not torch's temporaries:
    these are asked of torch's profiler, and counted as if all of a call were alive at its peak. Not seen: gloo's own.
    """
    reducer = StatsReducer()
    StatsReducer(name="warm-up")({"loss": 1.0}, 8.0)  # lazy imports and the connection are not a matter of paths
    stats = {key(index): index % 13 + 0.5 for index in range(keys)}
    gc.collect()
    # Tracing goes on until the rank ends: `tracemalloc.stop` beside a gloo thread crashes CPython (gh-128679).
    tracemalloc.start()
    start, _ = tracemalloc.get_traced_memory()
    first_peak, _ = _traced_call(reducer, stats)
    _traced_call(reducer, stats)
    steady_peak, result = _traced_call(reducer, stats)
    retained = tracemalloc.get_traced_memory()[0] - start
    return Memory(first_peak, steady_peak, _torch_bytes(reducer, stats), retained, result)


def _traced_call(reducer: StatsReducer, stats: dict[str, float]) -> tuple[int, int]:
    """(peak of the call beside its result, size of the result: what its end gives back)."""
    gc.collect()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    reduced: Any = reducer(stats, 8.0)
    _, peak = tracemalloc.get_traced_memory()
    gc.collect()
    with_result, _ = tracemalloc.get_traced_memory()
    assert len(reduced.values) == len(stats)
    del reduced
    result = with_result - tracemalloc.get_traced_memory()[0]
    return peak - before - result, result


def _torch_bytes(reducer: StatsReducer, stats: dict[str, float]) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        reducer(stats, 8.0)
    events: Any = profile.events() or ()
    return sum(max(0, event.self_cpu_memory_usage) for event in events)


# -- import -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportCost:
    """Milliseconds of a whole interpreter with ``import ddpstats`` and of one without, in turns."""

    with_import_ms: Spread
    bare_ms: Spread
    loads_torch: bool


def import_cost(times: int) -> ImportCost:
    """Start ``times`` fresh interpreters of each kind."""
    samples: dict[str, list[float]] = {"import ddpstats": [], "pass": []}
    for _ in range(times):
        for code, sample in samples.items():
            started = time.perf_counter()
            _python(code)
            sample.append(1e3 * (time.perf_counter() - started))
    loaded = json.loads(_python("import ddpstats, json, sys; print(json.dumps('torch' in sys.modules))"))
    return ImportCost(Spread.of(samples["import ddpstats"]), Spread.of(samples["pass"]), loaded)


def _python(code: str) -> str:
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, check=True, text=True, timeout=60
    ).stdout
