"""`backward()` under `no_sync()` does not reduce."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(model, batches):
    model = DDP(model)
    with model.no_sync():
        for batch in batches:
            loss = model(batch)
            if torch.isnan(loss):
                continue
            loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
