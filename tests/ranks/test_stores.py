"""Stores of every kind serve reductions, and a backend that cannot is a `ConfigError`, with nothing closed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

import ddpstats
from ddpstats._ranks.gloo import store_of
from ddpstats._ranks.store import BoundedStore, StoreLog, StoreSilent, bounded, rest
from ddpstats.errors import ConfigError
from ddpstats.testing import run_ranks

LIMIT_SEC = 90.0


def tcp() -> Any:
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def everything() -> list[Any]:
    group = dist.new_group()
    with ddpstats.StatsReducer(group=group, timeout_sec=30) as reducer:
        results: list[Any] = [reducer({"a": float(dist.get_rank())}).values, ddpstats.any_rank(dist.get_rank() == 1)]
        results.append(reducer.start({"a": 1.0}).result().values)
    with ddpstats.collective_guard("strict", timeout_sec=30):
        dist.all_reduce(torch.ones(1))
    return results


def over(kind: str, path: str) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    stores = {
        "nested": lambda: PrefixStore("a", PrefixStore("b", PrefixStore("c", tcp()))),
        "nested file": lambda: PrefixStore("a", PrefixStore("b", FileStore(path, size))),
    }
    dist.init_process_group("gloo", store=PrefixStore(kind, stores[kind]()), rank=rank, world_size=size)
    return everything()


@pytest.mark.parametrize("kind", ["nested file", pytest.param("nested", marks=pytest.mark.slow)])
def test_store_of_any_kind_serves_reductions_and_guard(kind: str, tmp_path: Path) -> None:
    results = run_ranks(over, 2, kind, str(tmp_path / "store"), timeout_sec=LIMIT_SEC).values()
    assert results == [[{"a": 0.5}, True, {"a": 1.0}]] * 2


@pytest.mark.parametrize("kind", ["file", "hash", "tcp"])
def test_a_look_writes_nothing_and_finds_what_is_new(kind: str, tmp_path: Path) -> None:
    written = tmp_path / "store"
    stores: dict[str, Callable[[], Any]] = {
        "file": lambda: FileStore(str(written), 1),
        "hash": HashStore,
        "tcp": lambda: TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False),
    }
    store = bounded(stores[kind]())
    reader, writer = StoreLog(store, "log"), StoreLog(store, "log")
    assert (reader.unread(), store.counted("log")) == ({}, 0)
    for number in range(3):
        writer.append(number % 2, f"note {number}")
        assert reader.unread() == {number % 2: f"note {number}".encode()}
        before = written.read_bytes() if kind == "file" else b""
        assert (reader.unread(), store.counted("log"), store.counted("nowhere")) == ({}, number + 1, 0)
        assert before == (written.read_bytes() if kind == "file" else b"")
    assert writer.unread() == {0: b"note 2", 1: b"note 1"}
    for foreign in ("", "3", "note 3", "-1 note", "1"):
        store.set(f"log/{store.add('log', 1)}", foreign)
    assert reader.unread() == {1: b"", 3: b""}


def test_a_look_never_waits_for_a_key_that_another_rank_deletes() -> None:
    server: Any = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    clone, is_over = server.clone(), threading.Event()

    def write_and_delete() -> None:
        while not is_over.is_set():
            clone.set("key", "value")
            clone.delete_key("key")

    thread, store = threading.Thread(target=write_and_delete, daemon=True), bounded(server)
    thread.start()
    try:
        with store.within(LIMIT_SEC / 2):
            assert {store.find("key") for _ in range(3000)} == {None, b"value"}
    finally:
        is_over.set()
        thread.join()


def over_fake(with_store: bool) -> list[str]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore() if with_store else FakeStore(), rank=0, world_size=4)  # type: ignore[attr-defined]
    texts = []
    for attempt in (
        lambda: ddpstats.reduce_stats({"a": 1.0}),
        lambda: ddpstats.any_rank(True),
        lambda: ddpstats.all_ranks(True),
        lambda: ddpstats.StatsReducer().start({"a": 1.0}).result(),
        lambda: ddpstats.recursive_average({"a": torch.tensor(1.0)}, torch.tensor(1.0), True),
        ddpstats.collective_guard("strict").__enter__,
        ddpstats.collective_guard("step").__enter__,
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        texts.append(str(caught.value))
    dist.all_reduce(torch.ones(1))
    return texts


@pytest.mark.parametrize("with_store", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_fake_backend_is_refused(with_store: bool) -> None:
    (texts,) = run_ranks(over_fake, 1, with_store, timeout_sec=LIMIT_SEC).values()
    assert all("the backend 'fake'" in text for text in texts)


def test_request_that_could_not_begin_in_time_never_does() -> None:
    go_on, answered = threading.Event(), list[int]()
    store = BoundedStore(object)

    def wait(raw: Any, prefix: str) -> None:
        go_on.wait(30)

    with pytest.raises(StoreSilent):
        store.use(wait, 0.1)
    with pytest.raises(StoreSilent):
        store.use(lambda raw, prefix: answered.append(1), 0.1)
    go_on.set()
    store.use(lambda raw, prefix: answered.append(2), 30.0)
    assert answered == [2]


def fail_to_add() -> bool:
    """Return whether the store knows a group of this rank's, after an `add` that this rank alone made and got wrong."""
    window = ddpstats.StatsWindow()
    if dist.get_rank() == 1:
        with pytest.raises(ddpstats.InvalidStats):
            window.add({"loss": object()})
    time.sleep(0.5)  # for a connection in the background
    world: Any = dist.group.WORLD
    return bool(store_of(world).check([f"ddpstats/generation/{dist.get_rank()}"]))


def test_rank_that_has_not_reduced_yet_is_in_no_group_of_the_store() -> None:
    """It would be one group ahead of the others, and miss them once the group is made again on the same store."""
    assert run_ranks(fail_to_add, 2, timeout_sec=LIMIT_SEC).values() == [False, False]


@pytest.mark.slow
def test_threads_may_end_while_others_begin() -> None:
    def used() -> BoundedStore:
        store = BoundedStore(HashStore)
        store.set("key", "value")
        return store

    kept = [used() for _ in range(200)]
    is_over = threading.Event()

    def connect_often() -> None:
        while not is_over.is_set():
            kept.append(used())

    threads = [threading.Thread(target=connect_often) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            rest(0.0)
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        for thread in threads:
            thread.join(10.0)
    assert not any(thread.is_alive() for thread in threads)


def test_store_that_is_gone_is_asked_once() -> None:
    """Each further request would log frames of C++."""
    asked = list[int]()

    def ask(raw: Any, prefix: str) -> None:
        asked.append(1)
        raise dist.DistNetworkError("Broken pipe")

    store = BoundedStore(HashStore)
    for _ in range(3):
        with pytest.raises(dist.DistNetworkError, match="Broken pipe"):
            store.use(ask)
    assert asked == [1]
