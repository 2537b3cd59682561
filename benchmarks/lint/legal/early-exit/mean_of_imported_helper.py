"""The loss is reduced by a helper whose name says so."""

import torch.distributed as dist
from utils import reduce_loss


def loop(loader):
    for batch in loader:
        loss = reduce_loss(step(batch))
        if loss > 10:
            break
        dist.barrier()
