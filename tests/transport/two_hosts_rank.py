"""One rank of two hosts; the link between them goes down once a file is there. Run by `test_two_hosts`.

python -m tests.transport.two_hosts_rank RANK WORLD_SIZE ADDRESS PORT PHASE DIRECTORY
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ddpstats
from tests.transport.store_host_rank import attempt

TIMEOUT_SEC = 8.0


def main(rank: int, world_size: int, address: str, port: str, phase: str, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    reducer = ddpstats.StatsReducer(timeout_sec=TIMEOUT_SEC)
    if phase != "before":
        reducer({"a": 1.0})
    (directory / f"ready{rank}").touch()
    if phase != "during":
        while not (directory / "down").exists():
            time.sleep(0.05)
    elif rank == 0:
        time.sleep(3600)  # stays away, and is killed in the end
    told = attempt(lambda: reducer({"a": 1.0}))
    print(json.dumps([told, attempt(lambda: reducer({"a": 1.0}))]), flush=True)


if __name__ == "__main__":
    address, port, phase, directory = sys.argv[3:]
    main(int(sys.argv[1]), int(sys.argv[2]), address, port, phase, Path(directory))
