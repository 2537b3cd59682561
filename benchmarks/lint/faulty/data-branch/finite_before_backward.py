"""A rank whose loss is not finite skips `backward()` of the wrapped model."""

import torch
from torch.nn.parallel import DistributedDataParallel


def train(model, loader):
    model = DistributedDataParallel(model)
    for batch in loader:
        loss = model(batch)
        if torch.isfinite(loss):
            loss.backward()  # expect: data-branch
