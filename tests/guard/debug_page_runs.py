"""Programs for the ranks of `test_debug_page`."""

from __future__ import annotations

import time
import urllib.request
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _WorkerServer
from torch.distributed.debug._frontend import FrontendServer
from torch.distributed.debug._store import tcpstore_client

from ddpstats.guard import collective_guard, debug_handler, debug_page
from tests.guard.live_runs import find_things

LIMIT_SEC = 60.0


def page_while_rank_0_waits(captures: str) -> str:
    """As `torch.distributed.debug.start_debug_server` does, on free ports and in this process; rank 1 asks."""
    rank, store = dist.get_rank(), tcpstore_client()
    page = debug_handler()
    server = _WorkerServer("127.0.0.1", 0)
    store.set(f"rank{rank}", f"http://127.0.0.1:{server.port}")
    find_things(captures, "page")
    with collective_guard("step", timeout_sec=LIMIT_SEC):
        stats = {"<b>loss": torch.ones(1)}
        for key in stats:
            dist.all_reduce(stats[key])
        text = _page(page, store) if rank else ""
        dist.all_reduce(torch.ones(1))
    assert debug_page._tidings is not None
    debug_page._tidings.close()
    debug_page._tidings = None
    store.wait(["asked"])
    server.shutdown()
    return text


def _page(page: Any, store: Any) -> str:
    """Rank 1's view of it, once rank 0 is seen to wait."""
    frontend = FrontendServer(port=0, handlers=[page])
    try:
        deadline = time.monotonic() + LIMIT_SEC / 2
        while time.monotonic() < deadline:
            address = f"http://localhost:{frontend._server.server_port}/ddpstats"
            with urllib.request.urlopen(address, timeout=LIMIT_SEC) as answer:
                text = str(answer.read().decode())
            if "rank 0: waits" in text:
                break
            time.sleep(0.1)
        return text
    finally:
        frontend._server.shutdown()
        frontend._server.server_close()
        store.set("asked", "1")
