"""docs/protocol.md is enough to write a rank from: one that was takes part in reductions with ddpstats on the other."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ddpstats
from ddpstats import All, Max, Min, StatsReducer, Sum
from ddpstats._ranks.agreement import Agreement, Call, Counters
from ddpstats._ranks.comm import SoloComm
from ddpstats._ranks.lanes import capacity_for
from ddpstats._reduction.layout import Layout
from ddpstats._reduction.reduction import Reduction
from ddpstats._reduction.site import ReductionSite
from ddpstats._reduction.values import Prepared
from ddpstats._reduction.wire import encode_schema
from ddpstats.testing import RankPool
from tests.ranks import second_rank
from tests.ranks.second_rank import SecondRank

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
TIMEOUT_SEC = 120.0  # generous, for a busy machine
MARKERS = {Sum: "sum", Min: "min", Max: "max", ddpstats.Any: "any", All: "all"}

# Stats and weight of rank 0, then of rank 1, and how many collectives the call takes.
CALLS: list[tuple[Any, float, Any, float, int]] = [
    ({"loss": 0.5}, 8.0, {"loss": 1.5}, 2.0, 2),  # nothing is agreed on yet
    ({"loss": 0.25}, 8.0, {"loss": 3.0}, 1.0, 1),
    ({"loss": 0.25, "l1": {"a": 1.0}}, 8.0, {"snr": -2.0, "loss": 0.1}, 3.0, 2),  # both have something new
    ({"loss": 0.7}, 8.0, {"l1": {"a": 2.0}, "snr": -1.0}, 3.0, 1),  # and now they only lack something
    ({"loss": math.nan}, 1.0, {"loss": 1.0, "snr": math.inf}, 1.0, 1),
    ({"loss": None, "l1": None}, 1.0, {"loss": 1.0}, 4.0, 2),  # None in the place of a container
    ({"loss": None, "l1": None}, 1.0, {"loss": None}, 4.0, 1),
    ({"n": Sum(3.0), "low": Min(2.0)}, 1.0, {"n": Sum(4.0), "low": Min(-1.0), "high": Max(5.0)}, 1.0, 2),
    ({"n": Sum(3.0), "low": Min(2.0)}, 1.0, {"low": Min(math.nan), "high": Max(6.0)}, 1.0, 2),  # the second of maxima
    ({"any": ddpstats.Any(True), "all": All(True)}, 1.0, {"any": ddpstats.Any(False), "all": All(False)}, 1.0, 2),
    ({}, 1.0, {"list": [0.5, 0.25]}, 2.0, 2),
    ({"list": [0.5]}, 1.0, {}, 2.0, 1),  # the layout has minima, and no rank holds one
]


def _plain(stats: Any) -> Any:
    """As `SecondRank` takes them."""
    if isinstance(stats, dict):
        return {key: _plain(value) for key, value in stats.items()}
    if isinstance(stats, list):
        return [_plain(value) for value in stats]
    return (MARKERS[type(stats)], float(stats.value)) if type(stats) in MARKERS else stats


def two_implementations() -> tuple[list[Any], list[int], bool]:
    """What each call gives on this rank, its collectives, and a decision."""
    group: Any = dist.new_group([0, 1])
    results, collectives = [], []
    if dist.get_rank() == 0:
        with StatsReducer(group=group, name="train", timeout_sec=TIMEOUT_SEC) as reducer:
            for stats, weight, _, _, _ in CALLS:
                before = reducer.counters.collectives
                found = reducer(stats, weight=weight)
                results.append({name: tuple(entry)[:4] for name, entry in found.entries()})
                collectives.append(reducer.counters.collectives - before)
        decision = ddpstats.any_rank(False, group=group)
    else:
        rank = SecondRank(group, ddpstats.__version__, TIMEOUT_SEC)
        for _, _, stats, weight, _ in CALLS:
            before = rank.collectives
            results.append(rank.reduce(_plain(stats), weight, "train"))
            collectives.append(rank.collectives - before)
        decision = rank.any_rank(True)
    dist.destroy_process_group(group)
    return results, collectives, decision


@pytest.mark.slow
def test_rank_written_from_the_page_reduces_with_ddpstats(two_ranks: RankPool) -> None:
    (ours, our_collectives, our_decision), (theirs, their_collectives, their_decision) = two_ranks.run(
        two_implementations, timeout_sec=TIMEOUT_SEC
    ).values()
    for call, one, other in zip(CALLS, ours, theirs, strict=True):
        assert list(one) == list(other), call
        assert repr(one) == repr(other), call
    assert our_collectives == their_collectives == [call[-1] for call in CALLS]
    assert our_decision is their_decision is True


def test_the_example_of_the_page_is_what_both_send() -> None:
    shown = dict(re.findall(r"^(\w+) += (\S.*)$", PAGE.read_text(), re.MULTILINE))
    schema = second_rank.schema_of({"loss": 0.5})
    agreed = second_rank.digest8(second_rank.schema_bytes(second_rank.EMPTY))
    status = second_rank.status_bytes(
        "reduce_stats", "train", "propagate", True, agreed, b"\0\0" + second_rank.schema_bytes(schema)
    )
    lanes = second_rank.call_lanes("reduce_stats", "train", "propagate", agreed)
    assert shown == {
        "schema": second_rank.schema_bytes(schema).hex(),
        "agreed": agreed.hex(),
        "lanes": ", ".join(f"{lane:.0f}" for lane in lanes),
        "status": status.hex(),
        "numbers": second_rank.numbers_bytes(second_rank.numbers_of({"loss": 0.5}, 8.0)).hex(),
        "slots": ", ".join(f"{lane:.0f}" for lane in _lanes_of_slots({"loss": 0.5, "acc": 0.25}, 8.0)),
    }
    ours = Agreement(SoloComm(), "").seal(Call("reduce_stats", "train", "propagate", 1.0), ReductionSite())
    assert list(ours.lanes) == lanes
    assert Layout().fingerprint == agreed
    assert encode_schema(Layout().root) == second_rank.schema_bytes(second_rank.EMPTY)
    assert [capacity_for(n) for n in (16, 64, 65, 2000)] == [second_rank.capacity_for(n) for n in (16, 64, 65, 2000)]


def _lanes_of_slots(stats: Any, weight: float) -> list[float]:
    """What a rank writes from lane 16 on, on the layout of these stats: alone, the sum over ranks is what it wrote."""
    agreement, counters = Agreement(SoloComm(), ""), Counters()
    for _ in range(2):  # the first call makes the layout
        call = Call("reduce_stats", "train", "propagate", TIMEOUT_SEC)
        Reduction(agreement, call, True, counters).reduce(Prepared(stats, weight, False, False))
    return list(agreement.buffer.lanes[16 : 16 + 3 * len(stats)])
