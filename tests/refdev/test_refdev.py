"""The reference accelerator is one: it does not wait, cannot be read by the host, and trains as the CPU does."""

from __future__ import annotations

import pytest

from ddpstats.testing import RankPool, run_ranks

from . import runs

pytestmark = pytest.mark.slow


def test_kernels_and_pinned_copies_of_a_busy_device_return_at_once(refdev_rank: RankPool) -> None:
    assert refdev_rank.run(runs.launches).values() == [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]


def test_what_needs_values_waits(refdev_rank: RankPool) -> None:
    assert min(refdev_rank.run(runs.waits).values()[0]) > 0.2


def test_the_driver_counts_what_the_host_does(refdev_rank: RankPool) -> None:
    read, to_host, to_device, add = refdev_rank.run(runs.counts).values()[0]
    assert {name: read[name] for name in ("host_reads", "synchronizations")} == {"host_reads": 1, "synchronizations": 1}
    assert to_host == {"launches": 1, "copies_to_host": 1, "synchronizations": 1}
    assert to_device == {"allocations": 1, "launches": 1, "copies_to_device": 1, "synchronizations": 1}
    assert add == {"allocations": 1, "launches": 1}


def test_the_host_cannot_read_the_memory(refdev: None) -> None:
    assert [outcome.exit_code for outcome in run_ranks(runs.read_by_the_host, 1)] == [-11]


def test_streams_are_not_ordered_without_an_event(refdev_rank: RankPool) -> None:
    early, ordered, milliseconds, is_early = refdev_rank.run(runs.streams).values()[0]
    assert (early, ordered, is_early) == (0.0, 1.0, 0.0)
    assert milliseconds > 190


def test_an_asynchronous_error_stays(refdev: None) -> None:
    messages = run_ranks(runs.error_that_stays, 1).values()[0]
    assert len(messages) == 3
    assert len(set(messages)) == 1
    assert "index 7 is out of bounds" in messages[0]


@pytest.mark.parametrize(
    ("kind", "how"),
    [("ddp", "plain"), ("ddp", "reentrant"), ("ddp", "not reentrant"), ("fsdp2", "plain"), ("fsdp2", "not reentrant")],
)
def test_training_is_that_of_the_cpu(refdev_ranks: RankPool, kind: str, how: str) -> None:
    assert max(refdev_ranks.run(runs.difference_from_the_cpu, how, kind).values()) < 1e-6


def test_collectives_of_a_busy_device_return_at_once(refdev_ranks: RankPool) -> None:
    assert refdev_ranks.run(runs.collective_of_a_busy_device).values() == [4.0, 4.0]


def test_the_watchdog_ends_a_rank_whose_collective_never_ends(refdev: None) -> None:
    outcomes = run_ranks(runs.collective_that_never_ends, 2, timeout_sec=25)
    assert outcomes[0].exit_code == -6
    words = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE"
    assert words in str(outcomes[0].error)
