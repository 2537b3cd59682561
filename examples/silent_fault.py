"""A bit flips in one rank's backward pass: named on that rank, before the gradients are reduced.

The scenario of MindSpore's documentation on feature value detection: four ranks, and at step 5 a fault on rank 2. In
mode 1 the sentinel logs it and goes on: from step 6 on every rank has NaN. In mode 2 it stops all ranks at step 5, and
no parameter has seen the fault. In mode 3 it logs normal values, too.

::

    scripts/launch.sh 4 examples/silent_fault.py 2
"""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats import Sentinel, SentinelAlarm
from ddpstats.testing import BitFlip, inject_bit_flips

STEPS = 8
# The highest bit of the exponent: a number below 2 becomes 2**128 times as large.
FAULT = BitFlip("3", "activation_gradient", element=0, bit=30, step=5, rank=2)


def make_model() -> nn.Module:
    """Three matrix products, as there, and two norm layers, whose gradients the sentinel looks at."""
    return nn.Sequential(
        nn.Linear(784, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(mode: int) -> str:
    """Until the sentinel stops it, or to the end. Every rank must call; returns what became of it in words."""
    torch.manual_seed(1)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    with Sentinel(model, mode=mode) as sentinel, inject_bit_flips(model, [FAULT]) as fault:
        for _ in range(STEPS):
            images, labels = torch.randn(32, 784), torch.randint(10, (32,))
            nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            try:
                sentinel.step()
            except SentinelAlarm as alarm:
                return f"stopped at step {alarm.step}, culprit ranks {list(alarm.culprit_ranks)}"
            optimizer.step()
            optimizer.zero_grad()
            fault.step()
    return f"went on to step {STEPS - 1}"


if __name__ == "__main__":
    logging.basicConfig(format="[%(levelname)s] %(message)s", level=logging.INFO)
    dist.init_process_group("gloo")
    try:
        outcome = train(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
        print(f"rank {dist.get_rank()}: {outcome}")
    finally:
        dist.destroy_process_group()
