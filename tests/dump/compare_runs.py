"""What processes do in tests of ``ddpstats compare``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpstats.dump import StatsDump
from tests.dump.collecting import batch, make_model


def one_step(path: Path, *, changed_rank: int | None) -> None:
    """A step under DDP, each rank with data of its own; one rank's copy of a weight is not what it should be."""
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(make_model())
    if rank == changed_rank:
        with torch.no_grad():
            model.module.get_parameter("1.linear.weight")[0, 0] += 1
    dump = StatsDump({"dump_path": str(path), "level": "mix"}, model=model)
    dump.start()
    model(batch(rank)).square().sum().backward()
    total = torch.tensor([float(rank)])
    torch.distributed.all_reduce(total)
    dump.stop()
    dump.step()


def good_and_bad(path: str) -> None:
    one_step(Path(path) / "good", changed_rank=None)
    one_step(Path(path) / "bad", changed_rank=1)
