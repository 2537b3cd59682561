"""What a rank sends, and asks of the store, does not grow with the number of ranks; and scripts/scale.py runs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ddpstats._agreement import agreement
from ddpstats._transport.store import shared_poll
from tests import programs
from tests.needs import needs

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


def test_one_rank_stands_for_all_that_do_the_same(counts: Any) -> None:
    some, everyone = counts.reductions(FEW, KEYS), counts.reductions(FEW, KEYS, played=FEW)
    for one, other in zip(some, everyone, strict=True):
        for what in ("collectives", "sent_bytes", "received_bytes"):
            assert one.per_rank(what) == other.per_rank(what), one.name


def test_what_a_rank_sends_does_not_grow_with_the_ranks(counts: Any) -> None:
    few, many = (by_name(counts.reductions(size, KEYS)) for size in (FEW, MANY))
    for name in ("handshake", "first call", "steady", "one new key", "own new keys"):
        for what in ("collectives", "sent_bytes"):
            assert many[name].most(what) == few[name].most(what), (name, what)
    assert many["steady"].most("received_bytes") == few["steady"].most("received_bytes")
    assert [many[name].most("collectives") for name in ("steady", "one new key")] == [1, 2]


def test_what_all_ranks_receive_of_all_ranks_is_bounded(counts: Any) -> None:
    """Where there is a new key each rank tells each other what it holds, until that would be too much."""
    size = 4096
    told = by_name(counts.reductions(size, 200))["one new key"]
    assert told.most("received_bytes") < 2**24 + 2**20
    assert told.most("collectives") <= 6


def test_many_ranks_with_keys_of_their_own_exchange_them_at_once(counts: Any) -> None:
    with mock.patch.object(agreement, "_MAX_MEETING_BYTES", 1):
        told = by_name(counts.reductions(20, KEYS, played=20))["own new keys"]
    assert told.most("collectives") == 4  # the sum, the digests, what all hold, the sum again


def test_meeting_takes_as_many_requests_among_many_ranks(counts: Any) -> None:
    few, many = counts.meeting(FEW), counts.meeting(MANY)
    for what in ("requests", "keys"):
        assert many.per_rank(what) <= few.per_rank(what) + 1, what
    assert many.most("keys") <= few.most("keys") + MANY - FEW, "one rank, the last to come, sees that all are there"


def test_a_rank_that_waits_asks_for_one_key_at_a_look(counts: Any) -> None:
    for size in (FEW, MANY):
        found = counts.waiting(size, looks=10)
        assert found.most("keys") * 10 <= 10 + 2  # and says once where it waits


@pytest.mark.parametrize("phase", ["missing", "missing_at_first_use"])
def test_who_is_missing_is_found_out_by_one_rank_for_all(counts: Any, phase: str) -> None:
    for size in (FEW, MANY):
        found = getattr(counts, phase)(size, timeout_sec=1.0)
        looks = found.per_rank("looks")
        assert found.per_rank("keys") <= 4 * looks + 30, (size, looks)


def test_a_comparison_between_hosts_takes_a_few_requests(counts: Any) -> None:
    few, many = (by_name(counts.compared(size, hosts=True)) for size in (FEW, MANY))
    for name, phase in many.items():
        for what in ("requests", "keys"):
            assert phase.most(what) == few[name].most(what), name
            assert phase.per_rank(what) < 7
    assert by_name(counts.compared(MANY, hosts=False))["guard, one host: compares"].most("requests") == 0
    waited = counts.guard_waiting(MANY, seconds=0.5)
    assert waited.per_rank("keys") == waited.per_rank("requests"), "one key each"


def test_the_store_is_asked_less_often_by_each_of_more_ranks() -> None:
    assert shared_poll(0.5, MANY) == 0.5
    for ranks in (5_000, 100_000):
        assert ranks / shared_poll(0.05, ranks) <= 5_000


def test_the_script_counts_measures_and_draws(tmp_path: Path) -> None:
    needs("matplotlib")
    written, drawn = tmp_path / "scale.json", tmp_path / "scale.png"
    command = [str(SCRIPTS / "scale.py"), "--ranks", "8", "--real", "2", "--json", str(written), "--png", str(drawn)]
    done = programs.run(command, timeout=200)
    assert done.returncode == 0, done.stderr
    for row in ("guard, verdict", "2 in a grid", "a call in one ring, ms", "a call in the grid, ms"):
        assert row in done.stdout
    told = json.loads(written.read_text())
    assert [one["median"]["files"] > 0 for one in told["real"]] == [True, True]
    assert told["constants"]["hop_sec"] > 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
