"""What a rank sends, and asks of the store, does not grow with the number of ranks, by exact counts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpstats._ranks.store import shared_poll

SCRIPTS = Path(__file__).parents[1] / "scripts"
FEW, MANY = 8, 64
KEYS = 10


@pytest.fixture(scope="module")
def counts() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("_scale_counts")


def by_name(phases: list[Any]) -> dict[str, Any]:
    return {phase.name: phase for phase in phases}


def test_counts_of_one_played_rank_are_those_of_all(counts: Any) -> None:
    some, everyone = counts.reductions(FEW, KEYS), counts.reductions(FEW, KEYS, played=FEW)
    for phase, phase_of_all in zip(some, everyone, strict=True):
        # What ranks hold that are not played is not known: the buffer has no room for it.
        counted = ("collectives",) if phase.name == "own new keys" else ("collectives", "sent_bytes", "received_bytes")
        for what in counted:
            assert phase.per_rank(what) == phase_of_all.per_rank(what), phase.name


def test_reduction_among_more_ranks_sends_no_more_per_rank(counts: Any) -> None:
    few, many = (by_name(counts.reductions(size, KEYS)) for size in (FEW, MANY))
    for name in ("handshake", "first call", "steady", "one new key"):
        for what in ("collectives", "sent_bytes"):
            assert many[name].most(what) == few[name].most(what), (name, what)
    assert many["steady"].most("received_bytes") == few["steady"].most("received_bytes")
    assert [many[name].most("collectives") for name in ("steady", "one new key")] == [1, 4]


def test_new_key_among_4096_ranks_is_received_in_bounded_bytes(counts: Any) -> None:
    """Each rank sends all others what it holds, until that would be too much."""
    phase = by_name(counts.reductions(4096, 200))["one new key"]
    assert phase.most("received_bytes") < 2**24 + 2**20
    assert phase.most("collectives") <= 6


def test_rendezvous_of_more_ranks_takes_no_more_requests_per_rank(counts: Any) -> None:
    few, many = counts.meeting(FEW), counts.meeting(MANY)
    for what in ("requests", "keys"):
        assert many.per_rank(what) <= few.per_rank(what) + 1, what
    assert many.most("keys") <= few.most("keys") + MANY - FEW, "one rank, the last to come, sees that all are there"


@pytest.mark.parametrize("size", [FEW, MANY])
def test_waiting_rank_asks_for_one_key_at_a_look(counts: Any, size: int) -> None:
    assert counts.waiting(size, looks=10).most("keys") * 10 <= 10 + 2  # and says once where it waits


@pytest.mark.parametrize("phase", [pytest.param("missing", marks=pytest.mark.slow), "missing_at_first_use"])
def test_missing_rank_is_found_with_few_requests_per_look(counts: Any, phase: str) -> None:
    for size in (FEW, MANY):
        waited = getattr(counts, phase)(size, timeout_sec=1.0)
        looks = waited.per_rank("looks")
        assert waited.per_rank("keys") <= 4 * looks + 30, (size, looks)


def test_comparison_between_more_hosts_takes_no_more_requests(counts: Any) -> None:
    few, many = (by_name(counts.compared(size, hosts=True)) for size in (FEW, MANY))
    for name, phase in many.items():
        for what in ("requests", "keys"):
            assert phase.most(what) == few[name].most(what), name
            assert phase.per_rank(what) < 7
    assert by_name(counts.compared(MANY, hosts=False))["guard, one host: compares"].most("requests") == 0
    waited = counts.guard_waiting(MANY, seconds=0.5)
    assert waited.per_rank("keys") == waited.per_rank("requests"), "one key each"


def test_each_of_more_ranks_asks_the_store_less_often() -> None:
    assert shared_poll(0.5, MANY) == 0.5
    for ranks in (5_000, 100_000):
        assert ranks / shared_poll(0.05, ranks) <= 5_000
