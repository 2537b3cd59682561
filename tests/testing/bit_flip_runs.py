"""A small model that is trained with flipped bits, under DDP on ranks and alone."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpstats import ConfigError
from ddpstats.testing import BitFlip, inject_bit_flips

STEPS = 3


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(model: nn.Module, flips: list[BitFlip], steps: int = STEPS, micro_batches: int = 1) -> dict[str, Any]:
    """Train; return losses and gradients of each step, the parameters at its end, and the faults applied."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    seen: dict[str, Any] = {"losses": [], "gradients": [], "parameters": []}
    with inject_bit_flips(model, flips) as faults:
        for step in range(steps):
            optimizer.zero_grad()
            for micro in range(micro_batches):
                local = micro + 1 < micro_batches and isinstance(model, nn.parallel.DistributedDataParallel)
                with model.no_sync() if local else contextlib.nullcontext():  # type: ignore[operator]
                    loss = model(batch(step, rank, micro)).square().mean()
                    loss.backward()
            seen["losses"].append(loss.item())
            seen["gradients"].append(gradients(inner))
            optimizer.step()
            seen["parameters"].append({name: p.detach().clone() for name, p in inner.named_parameters()})
            faults.step()
    return seen | {"applied": faults.applied}


def batch(step: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return torch.randn(5, 4, generator=generator)


def refused(flip: BitFlip) -> str:
    """Return the error's text; "" without an error."""
    try:
        with inject_bit_flips(make_model(), [flip]):
            return ""
    except ConfigError as error:
        return str(error)


def train_ddp(flips: list[BitFlip], micro_batches: int = 1, **options: Any) -> dict[str, Any]:
    return train(nn.parallel.DistributedDataParallel(make_model(), **options), flips, micro_batches=micro_batches)
