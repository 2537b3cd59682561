"""The loss comes from functions of other files, which may have reduced it."""

import torch.distributed as dist

from .utils import ddp_mean


def fit(model, loader, trainer):
    for epoch in range(9):
        loss = ddp_mean(run(model, loader))
        if loss > 10 or loss.item() > 9:
            return
        loss = trainer.train_step(loader)
        if loss < 0.01:
            break
        dist.barrier()
