"""A loss that divides by zero now and then: captured on the rank where it happens, then replayed down to the division.

A model that trains on a CPU in seconds, with a loss that is common: a binary cross entropy per class, divided by how
many samples the batch has of that class. With 20 classes and 128 random labels some class is missing from one batch in
36 or so, on one rank; after the all_reduce every rank would have the NaN, and nobody would know whence.

::

    scripts/launch.sh 2 examples/class_counts.py captures
    ddpstats replay captures --model examples.class_counts:make_model --step examples.class_counts:step --bisect
"""

from __future__ import annotations

import random
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddpstats import NaNCapture

CLASSES = 20
BATCH = 128
STEPS = 400


def make_model() -> nn.Module:
    """What `ddpstats replay --model` calls."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * 7 * 7, CLASSES),
    )


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of one batch, images (128, 3, 16, 16) and labels (128,). What `ddpstats replay --step` calls."""
    images, labels = batch
    outputs = model(images)
    losses = []
    for one in range(CLASSES):
        count = torch.count_nonzero(labels == one)
        masked = torch.where(labels == one, 1.0, 0.0)
        loss = F.binary_cross_entropy_with_logits(outputs[..., one], masked, reduction="sum")
        losses.append(loss / count)  # a class that is missing: something divided by zero
    return torch.stack(losses).mean()


class FakeImages(Dataset[tuple[Tensor, int]]):
    """Random images, random labels."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(3, 16, 16), random.randrange(CLASSES)


def train(dirpath: str, seed: int = 0) -> str:
    """Until the loss divides by zero. Every rank must call; each returns the same verdict in words."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    torch.manual_seed(seed + dist.get_rank())
    random.seed(seed + dist.get_rank())
    with NaNCapture(dirpath, model=model) as capture:
        for batch in DataLoader(FakeImages(), batch_size=BATCH):
            with capture.micro_batch(batch) as kept:
                loss = step(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                kept.loss = loss
            verdict = capture.check()
            if verdict.should_stop:
                return str(verdict)
            optimizer.step()
            optimizer.zero_grad()
    return f"no class was missing in {STEPS} steps"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        # The lowest rank logs the verdict as well.
        verdict = train(sys.argv[1] if len(sys.argv) > 1 else "captures")
        print(f"rank {dist.get_rank()}: {verdict.splitlines()[0]}")
    finally:
        dist.destroy_process_group()
