"""Small models, and dumps of them read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats.dump import StatsDump

LEAF_KEYS = [
    "type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad", "nan_count", "inf_count", "first_bad",
    "device", "stride", "data_ptr", "storage_offset", "storage_ptr", "storage_bytes", "storage_id", "stream", "moment",
]  # fmt: skip


class Block(nn.Module):
    """A block that is hard to hook: an in-place change right after a module, dropout, two users of one value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.25)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y += x
        out: Tensor = x + self.dropout(self.activation(self.linear(y)))
        return out


def make_model(width: int = 6) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, width), Block(width), Block(width), nn.Linear(width, 2))


def batch(number: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def dumped(
    path: Path,
    body: Callable[[], object],
    model: Any = None,
    level: str = "L1",
    *,
    step: int = 0,
    **config: Any,
) -> dict[str, Any]:
    """Dump one step of ``body``, and return its entries."""
    dump = StatsDump({"dump_path": str(path), "level": level, **config}, model=model)
    dump.start()
    try:
        body()
    finally:
        dump.stop()
        dump.step()
    return data(path, step)


def data(path: Path, step: int = 0, rank: str = "rank") -> dict[str, Any]:
    directory = path / f"step{step}" / rank
    assert not (directory / "dump_error_info.log").exists(), (directory / "dump_error_info.log").read_text()
    entries = json.loads((directory / "dump.json").read_text())["data"]
    assert isinstance(entries, dict)
    return entries


def lines(path: Path, step: int = 0, rank: str = "rank") -> list[dict[str, Any]]:
    """Return the lines of a step that has not ended, without a broken last one."""
    text = (path / f"step{step}" / rank / "dump.jsonl").read_text()
    return [json.loads(line) for line in text.split("\n")[:-1]]


def leaves(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every tensor's leaf in an entry."""
    if isinstance(value, dict):
        if value.get("type") == "torch.Tensor":
            yield value
        else:
            for member in value.values():
                yield from leaves(member)
    elif isinstance(value, list):
        for member in value:
            yield from leaves(member)


def hooks_of(model: nn.Module) -> int:
    count = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return count + sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())
