"""Exact counts show that what a rank sends, and asks of the store, does not grow with the number of ranks.

The table of docs/scale.md is compared with what is counted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpstats._ranks.grid import GRID_FROM_RANKS, sides_of
from ddpstats._ranks.store import shared_poll
from tests import scale_counts as counts
from tests.needs import ROOT
from tests.scale_counts import Phase

FEW, MANY = 8, 64
KEYS = 10


def table_of_the_page() -> dict[str, dict[int, str]]:
    """Return the cells by label and number of ranks."""
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs" / "scale.md").read_text().splitlines()]
    (head,) = [row for row in rows if row[0] == "per rank and call"]
    sizes = [int(cell.removesuffix(" ranks").replace(",", "")) for cell in head[1:-1]]
    begin = rows.index(head) + 2
    body = rows[begin : rows.index([""], begin)]
    return {label: dict(zip(sizes, cells, strict=False)) for label, *cells in body}


def counted(world_size: int) -> dict[str, str]:
    phases, first_use = counts.reductions(world_size, 50), counts.meeting(world_size)
    steady, new_key = phases["steady"], phases["new key"]
    assert steady.most("sent_bytes") == steady.most("received_bytes")
    sides = sides_of(world_size) if world_size >= GRID_FROM_RANKS else (world_size,)
    return {
        "the same keys again: collectives, bytes sent and received": _exact(steady, "collectives", "sent_bytes"),
        "a new key, on one rank: collectives, bytes sent": _exact(new_key, "collectives", "sent_bytes"),
        "a new key: bytes received": _exact(new_key, "received_bytes"),
        "handshake, once a group: bytes received": _exact(phases["handshake"], "received_bytes"),
        "hops of a sum, one after the other": f"{sum(2 * (side - 1) for side in sides)}",
        "the same in one ring": f"{2 * (world_size - 1):,}",
        "connections to other ranks": f"{sum(side - 1 for side in sides)}",
        "first use of a group: requests to the store": _mean_and_most(first_use, "requests"),
        "first use: keys in these": _mean_and_most(first_use, "keys"),
        "waits in a collective: requests at one look": _exact(counts.waiting(world_size, looks=5), "requests"),
        "guard, a comparison between hosts: requests": _mean_and_most(counts.comparison(world_size, True), "requests"),
    }


def _exact(phase: Phase, *quantities: str) -> str:
    return ", ".join(f"{phase.most(what):,.0f}" for what in quantities)


def _mean_and_most(phase: Phase, what: str) -> str:
    return f"{phase.per_rank(what):.0f} ({phase.most(what):,.0f})"


@pytest.mark.parametrize("size", [FEW, MANY, 256, pytest.param(1024, marks=pytest.mark.slow)])
def test_table_of_the_page_is_what_is_counted(size: int) -> None:
    assert {label: cells[size] for label, cells in table_of_the_page().items()} == counted(size)


def test_counts_of_three_played_ranks_are_those_of_all() -> None:
    some, everyone = counts.reductions(FEW, KEYS), counts.reductions(FEW, KEYS, played=FEW)
    for name, phase in some.items():
        for what in ("collectives", "sent_bytes", "received_bytes"):
            assert phase.per_rank(what) == everyone[name].per_rank(what), name


def test_new_key_among_4096_ranks_is_received_in_bounded_bytes() -> None:
    """Each rank sends all others what it holds, until that would be too much."""
    phase = counts.reductions(4096, 200)["new key"]
    assert phase.most("received_bytes") < 2**24 + 2**20
    assert phase.most("collectives") <= 6


def test_rendezvous_of_more_ranks_takes_no_more_requests_per_rank() -> None:
    few, many = counts.meeting(FEW), counts.meeting(MANY)
    for what in ("requests", "keys"):
        assert many.per_rank(what) <= few.per_rank(what) + 1, what
    assert many.most("keys") <= few.most("keys") + MANY - FEW, "one rank, the last to come, sees that all are there"


@pytest.mark.slow
@pytest.mark.parametrize("count", [counts.missing, counts.missing_at_first_use])
def test_missing_rank_is_found_with_few_requests_per_look(count: Callable[..., Phase]) -> None:
    for size in (FEW, MANY):
        waited = count(size, timeout_sec=1.0)
        looks = waited.per_rank("looks")
        assert waited.per_rank("keys") <= 4 * looks + 30, (size, looks)


def test_comparison_on_one_host_asks_the_store_for_nothing() -> None:
    assert counts.comparison(MANY, hosts=False).most("requests") == 0


def test_guard_that_waits_asks_for_one_key_at_a_look() -> None:
    waited = counts.guard_waiting(MANY, seconds=0.5)
    assert waited.per_rank("keys") == waited.per_rank("requests")


def test_verdict_of_the_guard_is_read_by_few_requests() -> None:
    """One rank reads all statuses, each by its key."""
    for size in (FEW, MANY):
        assert counts.guard_verdict(size).per_rank("requests") < 60


def test_each_of_more_ranks_asks_the_store_less_often() -> None:
    assert shared_poll(0.5, MANY) == 0.5
    for ranks in (5_000, 100_000):
        assert ranks / shared_poll(0.05, ranks) <= 5_000
