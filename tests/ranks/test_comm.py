"""Collectives of a `Comm` give the same results and errors over gloo, in a grid of gloo groups, and among threads."""

from __future__ import annotations

import functools
import gc
import hashlib
import math
import os
import pathlib
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddpstats._ranks import grid
from ddpstats._ranks.comm import (
    Comm,
    CommFailed,
    GlooComm,
    group_store,
    resolve_group,
    slice_sec,
)
from ddpstats._ranks.gloo import own_connection, part_of
from ddpstats._ranks.grid import GridComm, gloo_comm, sides_of
from ddpstats._ranks.store import BoundedStore, bounded
from ddpstats.errors import ConfigError
from ddpstats.testing import RankPool
from ddpstats.testing.threads import ThreadComm, ThreadWorld

LIMIT_SEC = 60.0
LONG_SEC = 30.0
SHORT_SEC = 1.0
SLACK_SEC = 6.0  # for a machine that has other things to do
CLOSES_SEC = 5.0  # to close must not block, though an operation lasts for longer

# Calls a function of (comm, *args) on every rank of a fresh group and returns its values in rank order.
Doorway = Callable[..., list[Any]]


def _on_gloo(fn: Callable[..., Any], *args: Any) -> Any:
    group = dist.new_group()
    comm = gloo_comm(group, group_store(group), LONG_SEC)
    try:
        return fn(comm, *args)
    finally:
        comm.close()


def _gloo(pool: RankPool, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return pool.run(_on_gloo, fn, *args, timeout_sec=LIMIT_SEC).values()


def _threads(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    world = ThreadWorld(world_size)
    with ThreadPoolExecutor(world_size) as threads:
        answers = [threads.submit(fn, ThreadComm(world, rank), *args) for rank in range(world_size)]
        return [answer.result(LIMIT_SEC) for answer in answers]


def _on_grid(fn: Callable[..., Any], *args: Any) -> Any:
    """A grid of two cells, one of which has a guest."""
    with mock.patch.object(grid, "GRID_FROM_RANKS", 3), mock.patch.object(grid, "_LONGEST_SIDE", 2):
        sides_of.cache_clear()
        assert sides_of(3) == (2,)
        return _on_gloo(fn, *args)


def _grid(pool: RankPool, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return pool.run(_on_grid, fn, *args, timeout_sec=LIMIT_SEC).values()


def _grid_of_threads(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call the function in threads, whose grids make their gloo groups."""
    ranks, store = tuple(range(world_size)), dist.HashStore()  # type: ignore[attr-defined]

    def play(rank: int) -> Any:
        comm = GridComm(ranks, rank, bounded(store), LONG_SEC)
        try:
            return fn(comm, *args)
        finally:
            comm.close()

    with ThreadPoolExecutor(world_size) as threads:
        answers = [threads.submit(play, rank) for rank in range(world_size)]
        return [answer.result(LIMIT_SEC) for answer in answers]


KINDS = ["gloo-3", "grid-3", "threads-3"]
KINDS += [pytest.param(kind, marks=pytest.mark.slow) for kind in ("grid-18", "threads-64")]  # type: ignore[misc]
KINDS += [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("gloo-2", "grid-13")]  # type: ignore[misc]


@pytest.fixture(scope="module", params=KINDS)
def doorway(request: pytest.FixtureRequest) -> tuple[Doorway, int]:
    kind, size = request.param.split("-")
    if kind == "threads":
        return functools.partial(_threads, int(size)), int(size)
    if kind == "grid":
        if size == "3":
            return functools.partial(_grid, request.getfixturevalue("three_ranks")), int(size)
        return functools.partial(_grid_of_threads, int(size)), int(size)
    return functools.partial(_gloo, request.getfixturevalue({"2": "two_ranks", "3": "three_ranks"}[size])), int(size)


# -- what comes back ---------------------------------------------------------------------------------------------------


def values_of(rank: int, size: int) -> torch.Tensor:
    """Numbers whose sum depends on the order of additions, the same in every process."""
    generator = torch.Generator().manual_seed(size * 1000 + rank)
    return torch.randn(size, dtype=torch.float64, generator=generator) * 10.0**rank


def summed(comm: Comm, size: int) -> tuple[bytes, float]:
    tensor = values_of(comm.rank % 8, size)
    comm.all_reduce("sum", tensor, LONG_SEC)
    expected = torch.stack([values_of(rank % 8, size) for rank in comm.ranks]).sum(dim=0)
    return hashlib.sha256(tensor.numpy().tobytes()).digest(), ((tensor - expected).abs() / expected.abs()).max().item()


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_sum_has_the_same_bits_on_every_rank(doorway: tuple[Doorway, int], size: int) -> None:
    run, _ = doorway
    digests, errors = zip(*run(summed, size), strict=True)
    assert len(set(digests)) == 1
    assert max(errors) < 1e-9


def summed_specials(comm: Comm) -> list[float]:
    last = comm.rank == comm.ranks[-1]
    tensor = torch.tensor([math.nan if last else 1.0, math.inf if last else 1.0, 2.0**52, -0.0], dtype=torch.float64)
    comm.all_reduce("sum", tensor, LONG_SEC)
    return tensor.tolist()


def test_a_sum_keeps_infinity_and_nan_and_is_exact_for_integers(doorway: tuple[Doorway, int]) -> None:
    run, world_size = doorway
    for nan, inf, integer, zero in run(summed_specials):
        assert math.isnan(nan)
        assert (inf, integer, zero) == (math.inf, 2.0**52 * world_size, 0.0)


def largest(comm: Comm, size: int) -> list[float]:
    tensor = torch.tensor([float((slot * 7 + comm.rank * 3) % 11) for slot in range(size)], dtype=torch.float64)
    tensor[0] = -math.inf
    comm.all_reduce("max", tensor, LONG_SEC)
    return tensor.tolist()


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_max_is_elementwise(doorway: tuple[Doorway, int], size: int) -> None:
    run, world_size = doorway
    expected = [float(max((slot * 7 + rank * 3) % 11 for rank in range(world_size))) for slot in range(size)]
    assert run(largest, size) == [[-math.inf, *expected[1:]]] * world_size


def bytes_of(rank: int, size: int) -> bytes:
    return bytes((rank + index) % 256 for index in range(size))


def gathered(comm: Comm, size: int) -> list[bytes]:
    return list(map(bytes, comm.all_gather(bytes_of(comm.rank, size), LONG_SEC)))


@pytest.mark.parametrize("size", [0, 1, 24, 5000])
def test_a_gather_is_in_rank_order(doorway: tuple[Doorway, int], size: int) -> None:
    run, world_size = doorway
    assert run(gathered, size) == [[bytes_of(rank, size) for rank in range(world_size)]] * world_size


def broadcast_from_each(comm: Comm, size: int) -> list[bytes]:
    received = []
    for source in range(len(comm.ranks)):
        tensor = torch.tensor(list(bytes_of(comm.rank, size)), dtype=torch.uint8)
        comm.broadcast(tensor, source, LONG_SEC)
        received.append(bytes(tensor.tolist()))
    return received


@pytest.mark.parametrize("size", [1, 5000])
def test_a_broadcast_brings_the_sources_bytes_to_every_rank(doorway: tuple[Doorway, int], size: int) -> None:
    run, world_size = doorway
    assert run(broadcast_from_each, size) == [[bytes_of(rank, size) for rank in range(world_size)]] * world_size


# -- a rank that does not come -----------------------------------------------------------------------------------------


def without_the_last(comm: Comm, operation: str) -> tuple[str, float, float] | None:
    """Return (the error, seconds until it came, seconds that `close` took) on the ranks that call."""
    if comm.rank == comm.ranks[-1]:
        time.sleep(SHORT_SEC + 1.0)
        return None
    started = time.monotonic()
    try:
        if operation == "sum":
            comm.all_reduce("sum", torch.ones(4, dtype=torch.float64), SHORT_SEC)
        else:
            comm.all_gather(b"x", SHORT_SEC)
    except CommFailed as error:
        failed = time.monotonic()
        comm.close()
        return str(error), failed - started, time.monotonic() - failed
    return "nothing", 0.0, 0.0


@pytest.mark.parametrize("operation", ["sum", pytest.param("gather", marks=pytest.mark.slow)])
def test_rank_that_never_comes_fails_the_others_in_time(doorway: tuple[Doorway, int], operation: str) -> None:
    run, world_size = doorway
    *failures, absent = run(without_the_last, operation)
    assert absent is None
    assert len(failures) == world_size - 1
    for error, waited_sec, close_sec in failures:
        assert error != "nothing"
        assert "\n" not in error
        assert waited_sec < SHORT_SEC + SLACK_SEC
        assert close_sec < CLOSES_SEC


class Enough(CommFailed):
    pass


def wait_for(over: str) -> None:
    """Wait until the rank that waits has given up, which makes that file."""
    deadline = time.monotonic() + LONG_SEC
    while not os.path.exists(over):
        assert time.monotonic() < deadline, "the first rank still waits"
        time.sleep(0.01)


def watched(comm: Comm, over: str) -> tuple[int, float] | None:
    """Return how often the waiting rank called `watch`, and the seconds until `watch` ended the wait."""
    looks: list[float] = []

    def watch() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise Enough("seen enough")

    if comm.rank != comm.ranks[0]:
        wait_for(over)
        return None
    comm.watch = watch
    started = time.monotonic()
    with pytest.raises(Enough, match="seen enough"):
        comm.all_reduce("sum", torch.ones(4, dtype=torch.float64), 2.0)
    waited_sec = time.monotonic() - started
    comm.close()
    comm.close()
    pathlib.Path(over).touch()
    return len(looks), waited_sec


def test_watch_is_asked_while_waiting_and_can_end_it(doorway: tuple[Doorway, int], tmp_path: pathlib.Path) -> None:
    run, _ = doorway
    first, *_ = run(watched, str(tmp_path / "over"))
    assert first[0] == 3
    assert 3 * slice_sec(2.0) * 0.9 < first[1] < 2.0 + SLACK_SEC


def test_a_grid_goes_with_its_last_user_without_the_garbage_collector() -> None:
    ranks, store = (0, 1), dist.HashStore()  # type: ignore[attr-defined]
    gc.disable()
    try:
        with ThreadPoolExecutor(len(ranks)) as threads:
            grids = list(threads.map(lambda rank: GridComm(ranks, rank, bounded(store), LONG_SEC), ranks))
        references = [weakref.ref(made) for made in grids]
        grids.clear()
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def interrupted(comm: Comm, over: str) -> bool | None:
    """Return whether closing did not block; the memory that the operation may still write to is kept."""

    def watch() -> None:
        raise KeyboardInterrupt

    if comm.rank != comm.ranks[0]:
        wait_for(over)
        return None
    comm.watch = watch
    with pytest.raises(KeyboardInterrupt):
        comm.all_gather(b"x", 2 * CLOSES_SEC)
    closing = time.monotonic()
    comm.close()
    close_sec = time.monotonic() - closing
    pathlib.Path(over).touch()
    return close_sec < CLOSES_SEC


def test_close_does_not_block_after_an_interrupt(doorway: tuple[Doorway, int], tmp_path: pathlib.Path) -> None:
    run, _ = doorway
    assert run(interrupted, str(tmp_path / "over"))[0] is True


def test_a_rank_that_is_interrupted_while_it_connects_can_report_it() -> None:
    """gloo waits for them on the connection to the store, and goes on to do so."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    store = BoundedStore(lambda: part_of(own_connection(server, "test"), "test"))

    def watch() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GlooComm((0, 1), 0, store.part("meet"), 10.0, watch)
    with store.within(5.0):
        store.set("left", "0")
    assert store.get("left") == b"0"


def closed_by_one(comm: Comm) -> tuple[str, float] | None:
    """Return the error and the seconds until it came, on the ranks that did not close."""
    comm.all_gather(b"here", LONG_SEC)
    if comm.rank == comm.ranks[-1]:
        comm.close()
        return None
    started = time.monotonic()
    with pytest.raises(CommFailed) as caught:
        comm.all_reduce("sum", torch.ones(4, dtype=torch.float64), 3.0)
    return str(caught.value), time.monotonic() - started


def test_rank_that_left_fails_the_others_in_time(doorway: tuple[Doorway, int]) -> None:
    run, _ = doorway
    *failures, _ = run(closed_by_one)
    for error, after_sec in failures:
        assert error
        assert after_sec < 2 * 3.0 + 5.0


# -- which group -------------------------------------------------------------------------------------------------------


def test_group_without_a_process_group_is_refused() -> None:
    assert not dist.is_initialized()
    assert resolve_group(None) is None
    with pytest.raises(ConfigError, match=r"group= is given, but torch\.distributed is not initialized on this rank"):
        resolve_group("group")


def groups_of_all_kinds() -> list[str]:
    first_only = dist.new_group([0])
    answers: list[str] = []
    for group in (None, dist.group.WORLD, first_only, "world", 0):
        try:
            resolved = resolve_group(group)
            answers.append("none" if resolved is None else f"{resolved.size()} ranks")
        except ConfigError as error:
            answers.append(str(error))
    return answers


def test_a_group_is_resolved_or_refused(two_ranks: RankPool) -> None:
    members, outside = two_ranks.run(groups_of_all_kinds, timeout_sec=LIMIT_SEC).values()
    wrong = "group= is of type {}; a torch.distributed ProcessGroup or None is needed"
    assert members == ["2 ranks", "2 ranks", "1 ranks", wrong.format("str"), wrong.format("int")]
    assert outside[2] == "rank 1 is not a member of the group it passed; only members may call"
    assert outside[:2] + outside[3:] == members[:2] + members[3:]


def sums_over_overlapping_groups() -> dict[str, float]:
    """Ranks 0 and 1, and ranks 1 and 2: rank 1 is in more groups than its peers."""
    pairs = {"01": dist.new_group([0, 1]), "12": dist.new_group([1, 2])}
    sums: dict[str, float] = {}
    for name, group in pairs.items():
        if str(dist.get_rank()) in name:
            comm = gloo_comm(group, group_store(group), LONG_SEC)
            tensor = torch.tensor([float(comm.rank)], dtype=torch.float64)
            comm.all_reduce("sum", tensor, LONG_SEC)
            sums[name] = tensor.item()
            comm.close()
    return sums


def test_groups_may_overlap(three_ranks: RankPool) -> None:
    sums = three_ranks.run(sums_over_overlapping_groups, timeout_sec=LIMIT_SEC).values()
    assert sums == [{"01": 1.0}, {"01": 1.0, "12": 3.0}, {"12": 3.0}]
