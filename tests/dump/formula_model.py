"""A tiny model without any random number, and a dump of one step of it: what ``msprobe_dump/`` was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats.dump import StatsDump


def by_formula(*shape: int) -> Tensor:
    """Return small values that are exact in binary: 0, 1/8, ... up to 10/8, and again from 0, less one half."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 % 11).to(torch.float32) / 8 - 0.5).reshape(shape)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 4)
        self.fc2 = nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(by_formula(*parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return y


def dump_formula_model(path: Path, *, task: str = "statistics", change: float = 0.0, **config: Any) -> Path:
    """Dump one step of it, and return the step's directory.

    Args:
        change: added to one weight of the second layer.
    """
    model = Net()
    with torch.no_grad():
        model.fc2.weight[0, 0] += change
    batch = by_formula(2, 3)
    dump = StatsDump({"dump_path": str(path), "level": "mix", "task": task, **config}, model=model)
    dump.start()
    try:
        model(batch).square().sum().backward()
    finally:
        dump.step()
    return path / "step0"
