"""A rank reduces only where its own loss is above a limit."""

import torch.distributed as dist


def step(model, batch):
    loss = model(batch).mean()
    if loss > 10:
        dist.all_reduce(loss)  # expect: data-branch
