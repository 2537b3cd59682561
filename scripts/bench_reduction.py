"""What is timed against what, for one number of keys; runs inside the ranks.

Every variant says what its result has to be, and is held to that before a clock starts.

| variant | one call |
|---|---|
| bare | all_reduce of as many float64 as our own buffer has, on a gloo group of its own |
| floats, tensors | `StatsReducer` on a dict of floats, or of 1-element tensors; every rank holds every key |
| alternating floats, alternating tensors | the same with one half of the keys; the other rank holds the other half |
| per rank | floats with ``per_rank=True``, and `Reduced.by_rank` read |
| reduce_stats | the one-line function, on 1-element tensors |
| drop-in | `ddpstats.recursive_average` on 1-element tensors |
| espnet | one collective per leaf, as espnet 202511's `recursive_average` does it |
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _bench_loop import Body, Budget, Timings, interleaved

import ddpstats
from ddpstats import StatsReducer

_DICTS = 2  # as many different dicts take turns, so that no call sees the very objects of the last one
_TOLERANCE = 1e-5  # espnet and the drop-in compute and return float32

Averages = Mapping[str, float]
Held = Callable[[int, int], range]
"""Which keys rank r holds in round n."""


@dataclass(frozen=True)
class Measured:
    """What one number of keys gave on rank 0. ``against_leaves`` is empty where espnet was left out."""

    keys: int
    world_size: int
    payload_bytes: int
    per_leaf: str
    lean: Timings
    against_leaves: Timings


@dataclass(frozen=True)
class Variant:
    """A timed call, how its result is read, and which keys it is about."""

    body: Body
    read: Callable[[Any], Averages]
    held: Held


def measure(keys: int, budget: Budget, everything: bool) -> Measured:
    """Check and time the variants on fresh ranks; without ``everything`` only bare, floats and tensors. Collective."""
    reducer = StatsReducer()
    per_leaf, words = per_leaf_average()
    plain = _same_keys(keys, reducer)
    variants = plain | _alternating(keys) | {"per rank": _per_rank(keys)} if everything else plain
    slow = {**_one_liners(keys), "espnet": _averaging(keys, per_leaf)} if everything else {}
    for name, variant in (variants | slow).items():
        _verify(name, variant, keys)
    payload_bytes = payload_of(reducer, lambda: plain["floats"].body(0))  # of the largest layout by now
    bodies = {name: variant.body for name, variant in variants.items()}
    bodies["bare"] = _bare_all_reduce(payload_bytes // 8)
    slow_bodies = {"tensors": bodies["tensors"], **{name: variant.body for name, variant in slow.items()}}
    return Measured(
        keys=keys,
        world_size=dist.get_world_size(),
        payload_bytes=payload_bytes,
        per_leaf=words,
        lean=interleaved(bodies, budget),
        against_leaves=interleaved(slow_bodies, budget) if everything else Timings({}),
    )


def payload_of(reducer: StatsReducer, call: Callable[[], object]) -> int:
    """The bytes that one steady ``call`` of ``reducer`` puts into collectives; the first two are not counted."""
    call()
    call()
    before = reducer.counters
    call()
    after = reducer.counters
    assert after.renegotiations == before.renegotiations, "a steady call renegotiated"
    return after.payload_bytes - before.payload_bytes


# -- ours -------------------------------------------------------------------------------------------------------------


def _same_keys(keys: int, reducer: StatsReducer) -> dict[str, Variant]:
    def held(rank: int, number: int) -> range:
        return range(keys)

    return {"floats": _reducing(reducer, held, float), "tensors": _reducing(reducer, held, _tensor)}


def _alternating(keys: int) -> dict[str, Variant]:
    def held(rank: int, number: int) -> range:
        return range(keys // 2) if (rank + number) % 2 == 0 else range(keys // 2, keys)

    reducer = StatsReducer(name="alternating")
    return {
        "alternating floats": _reducing(reducer, held, float),
        "alternating tensors": _reducing(reducer, held, _tensor),
    }


def _per_rank(keys: int) -> Variant:
    def held(rank: int, number: int) -> range:
        return range(keys)

    dicts = [_stats(number, held, float) for number in range(_DICTS)]
    reducer, weight = StatsReducer(name="per rank", per_rank=True), _weight(dist.get_rank())

    def body(number: int) -> object:
        reduced = reducer(dicts[number % _DICTS], weight)
        return reduced.values, reduced.by_rank

    return Variant(body, lambda answer: answer[0], held)


def new_keys(calls: int, keys: int) -> list[float]:
    """Seconds of each of ``calls`` calls, each with ``keys`` keys that no rank has used before. Collective."""
    reducer, seconds = StatsReducer(name="new keys"), []
    for number in range(calls):
        stats = {f"step_{number}/{key(index)}": float(index) for index in range(keys)}
        dist.barrier()
        started = time.perf_counter()
        values = reducer(stats, 8.0).values
        seconds.append(time.perf_counter() - started)
        _require(values == stats, "new keys")
    return seconds


def _one_liners(keys: int) -> dict[str, Variant]:
    def held(rank: int, number: int) -> range:
        return range(keys)

    return {
        "reduce_stats": _reducing(ddpstats.reduce_stats, held, _tensor),
        "drop-in": _averaging(keys, ddpstats.recursive_average),
    }


def _reducing(reduce: Callable[[Any, Any], Any], held: Held, make: Callable[[float], Any]) -> Variant:
    dicts = [_stats(number, held, make) for number in range(_DICTS)]
    weight = _weight(dist.get_rank())

    def body(number: int) -> object:
        return reduce(dicts[number % _DICTS], weight).values  # nested when somebody asks for them

    return Variant(body, lambda values: values, held)


def _averaging(keys: int, average: Callable[[Any, torch.Tensor, bool], tuple[Any, torch.Tensor]]) -> Variant:
    def held(rank: int, number: int) -> range:
        return range(keys)

    dicts = [_stats(number, held, _tensor) for number in range(_DICTS)]
    weight = torch.tensor([_weight(dist.get_rank())])

    def body(number: int) -> object:
        return average(dicts[number % _DICTS], weight, True)

    return Variant(body, lambda answer: {name: float(value) for name, value in answer[0].items()}, held)


def _bare_all_reduce(lanes: int) -> Body:
    group: Any = dist.new_group(backend="gloo", group_desc="bench")
    options: Any = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=60)
    buffer = torch.full((lanes,), float(dist.get_rank() + 1), dtype=torch.float64)

    def body(number: int) -> object:
        return group.allreduce([buffer], options).wait()

    body(0)
    world_size = dist.get_world_size()
    _require(bool((buffer == world_size * (world_size + 1) / 2).all()), "bare all_reduce")
    buffer.zero_()  # else every call would double it
    return body


# -- espnet -----------------------------------------------------------------------------------------------------------


def per_leaf_average() -> tuple[Callable[[Any, torch.Tensor, bool], tuple[Any, torch.Tensor]], str]:
    """espnet's own function where it is installed, else ours that issues the same collectives; and which one it is."""
    try:
        module = importlib.import_module("espnet2.torch_utils.recursive_op")
        return module.recursive_average, f"espnet {importlib.metadata.version('espnet')} itself"
    except ImportError:
        return gathered_average, "espnet 202511 retold (it is not installed)"


def gathered_average(obj: Any, weight: torch.Tensor, distributed: bool) -> tuple[Any, torch.Tensor]:
    """What espnet 202511 does to a flat dict of tensors: all_gather and nanmean per leaf, all_reduce of the weight."""
    summed = {name: _gathered_sum((leaf * weight.type(leaf.dtype)).sum()) for name, leaf in obj.items()}
    total = weight.sum()
    dist.all_reduce(total)
    return {name: value / total.type(value.dtype) for name, value in summed.items()}, total


def _gathered_sum(value: torch.Tensor) -> torch.Tensor:
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    if all([torch.isnan(one) for one in everyone]):  # noqa: C419  (a list, as there: every element is looked at)
        return torch.stack(everyone).sum()
    return torch.nanmean(torch.stack(everyone)) * len(everyone)


# -- inputs, and what must come out -----------------------------------------------------------------------------------


def key(index: int) -> str:
    return f"loss_{index:05d}"


def _value(rank: int, number: int, index: int) -> float:
    return index % 13 + rank + number % _DICTS / 8


def _weight(rank: int) -> float:
    return 8.0 * (rank + 1)


def _tensor(value: float) -> torch.Tensor:
    return torch.tensor([value])


def _stats(number: int, held: Held, make: Callable[[float], Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    return {key(index): make(_value(rank, number, index)) for index in held(rank, number)}


def _expected(number: int, held: Held, keys: int) -> dict[str, float]:
    sums, weights = [0.0] * keys, [0.0] * keys
    for rank in range(dist.get_world_size()):
        for index in held(rank, number):
            sums[index] += _weight(rank) * _value(rank, number, index)
            weights[index] += _weight(rank)
    return {key(i): total / weight for i, (total, weight) in enumerate(zip(sums, weights, strict=True)) if weight}


def _verify(name: str, variant: Variant, keys: int) -> None:
    """Every dict that will take its turn, and the first once more: with warm caches, as it is when timed."""
    for number in (*range(_DICTS), 0):
        found, expected = variant.read(variant.body(number)), _expected(number, variant.held, keys)
        _require(set(found) == set(expected), name)
        _require(all(math.isclose(found[k], expected[k], rel_tol=_TOLERANCE) for k in expected), name)


def _require(right: bool, name: str) -> None:
    if not right:
        raise RuntimeError(f"the result of {name!r} is wrong, so its time means nothing")
