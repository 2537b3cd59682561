"""What ranks do in tests of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats.sentinel._checkpoints import Checkpoints


class Block(nn.Module):
    """A residual block, with what is hard about hooks: an in-place change right after the norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y += x
        out: Tensor = x + self.linear(y)
        return out


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), Block(6), Block(6), nn.LayerNorm(6), nn.Linear(6, 2))


def whole(gradient: Tensor) -> Tensor:
    """A 'value' that leaves nothing to chance: the gradient itself."""
    return gradient.detach().clone()


def train(spoil: bool, watched: bool) -> dict[str, Any]:
    """Two micro-batches under DDP, of each rank's own data. ``spoil``: rank 1's second loss is infinite."""
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(make_model())
    checkpoints = Checkpoints(model.module, None, torch.linalg.vector_norm) if watched else None
    torch.manual_seed(rank)
    batches = torch.randn(2, 3, 4)
    before = torch.get_rng_state()
    for number, batch in enumerate(batches):
        if checkpoints is not None:
            checkpoints.begin()
        loss = model(batch).square().sum()
        (loss * float("inf") if spoil and rank == number == 1 else loss).backward()
    values = [] if checkpoints is None else checkpoints.take()
    return {
        "values": [[(index, value.item()) for index, value in micro] for micro in values],
        "gradients": [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None],
        "random": torch.equal(before, torch.get_rng_state()),
    }
