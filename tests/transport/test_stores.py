"""Stores and backends of every kind: what can work works, and what cannot is refused in words, with nothing closed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

import ddpstats
from ddpstats.errors import ConfigError
from ddpstats.testing import run_ranks

LIMIT_SEC = 90.0


def tcp() -> Any:
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def everything() -> list[Any]:
    group = dist.new_group()
    with ddpstats.StatsReducer(group=group, timeout_sec=30) as reducer:
        found: list[Any] = [reducer({"a": float(dist.get_rank())}).values, ddpstats.any_rank(dist.get_rank() == 1)]
        found.append(reducer.start({"a": 1.0}).result().values)
    with ddpstats.collective_guard("strict", timeout_sec=30):
        dist.all_reduce(torch.ones(1))
    return found


def over(kind: str, path: str) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    stores = {
        "file": lambda: FileStore(path, size),
        "nested": lambda: PrefixStore("a", PrefixStore("b", PrefixStore("c", tcp()))),
        "nested file": lambda: PrefixStore("a", PrefixStore("b", FileStore(path, size))),
    }
    dist.init_process_group("gloo", store=PrefixStore(kind, stores[kind]()), rank=rank, world_size=size)  # type: ignore[no-untyped-call]
    return everything()


@pytest.mark.parametrize("kind", ["file", "nested", "nested file"])
def test_a_store_that_can_do_it_does(kind: str, tmp_path: Path) -> None:
    found = run_ranks(over, 2, kind, str(tmp_path / "store"), timeout_sec=LIMIT_SEC).values()
    assert found == [[{"a": 0.5}, True, {"a": 1.0}]] * 2


def over_fake(with_store: bool) -> list[str]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore() if with_store else FakeStore(), rank=0, world_size=4)  # type: ignore[attr-defined]
    said = []
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
        said.append(str(caught.value))
    dist.all_reduce(torch.ones(1))
    return said


@pytest.mark.parametrize("with_store", [False, True])
def test_the_fake_backend_is_refused(with_store: bool) -> None:
    (said,) = run_ranks(over_fake, 1, with_store, timeout_sec=LIMIT_SEC).values()
    assert all("the backend 'fake'" in text for text in said)
