"""Models and steps that `ddpstats replay` imports: the device is registered with them, as in a user's program."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tests.refdev.device  # noqa: F401  # registers it
from tests.training import Batch


class Root(nn.Module):
    """The root of what is positive, and otherwise nothing, whose gradient is not a number."""

    def forward(self, y: Tensor) -> Tensor:
        return torch.where(y > 0, (y * (y > 0)).sqrt(), torch.zeros_like(y))


class Checkpointed(nn.Module):
    """A model whose second half, with dropout in it, is computed again in the backward pass (reentrantly)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(6, 8), nn.Dropout(0.5)
        self.last, self.root = nn.Linear(8, 3), Root()
        self.register_buffer("shift", torch.full((3,), 10.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.second_half, self.first(x), use_reentrant=True)
        return out

    def second_half(self, y: Tensor) -> Tensor:
        out: Tensor = self.root(self.last(self.drop(torch.tanh(y))) + self.get_buffer("shift"))
        return out


def make_checkpointed() -> Checkpointed:
    torch.manual_seed(0)
    return Checkpointed()


def reduced_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss over the number of rows on all ranks, which a collective of the device counts."""
    rows = torch.ones(1, device=batch["x"].device) * len(batch["x"])
    dist.all_reduce(rows)
    loss: Tensor = ((model(batch["x"]) - batch["y"]) / batch["scale"]).square().sum() / rows.sum()
    return loss
