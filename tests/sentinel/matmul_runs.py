"""What runs on ranks: a small transformer trained under DDP, with and without a window over its matrix products."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpstats.sentinel._matmul import ChecksumWindow
from ddpstats.testing import BitFlip, inject_bit_flips


class Attention(nn.Module):
    """Written out, so that its products are operators of their own."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        scores = torch.baddbmm(mask, query, key.transpose(1, 2), alpha=0.25)
        mixed: Tensor = self.out(torch.einsum("bst,btd->bsd", scores.softmax(-1), value))
        return mixed


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    ends = nn.Linear(8, 16), nn.Linear(16, 4)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(ends[0], Attention(), nn.LayerNorm(16), layer, ends[1])


def train(model: nn.Module, steps: int = 3, dtype: torch.dtype = torch.float32, autocast: bool = False) -> list[Tensor]:
    """The parameters afterwards, and the random state."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(3, 5, 8, generator=generator).to(dtype)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
    return [*(parameter.detach().clone() for parameter in model.parameters()), torch.get_rng_state()]


def train_ddp(with_window: bool) -> tuple[list[Tensor], ChecksumWindow]:
    window = ChecksumWindow()
    with window if with_window else contextlib.nullcontext():
        found = train(nn.parallel.DistributedDataParallel(make_model()))
    return found, window


def train_ddp_with_a_flip(flip: BitFlip) -> dict[str, Any]:
    """Where this rank's window saw a fault, and what was flipped on it."""
    model = nn.parallel.DistributedDataParallel(make_model())
    with ChecksumWindow() as window, inject_bit_flips(model, [flip]) as faults:
        train(model, steps=1)
    return {"faults": window.faults, "applied": faults.applied}
