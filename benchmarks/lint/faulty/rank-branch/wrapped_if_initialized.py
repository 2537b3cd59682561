"""The model is wrapped where there is a process group, and rank 0 alone calls `backward()`."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def fit(net, x, rank):
    if dist.is_initialized():
        model = DDP(net)
    else:
        model = net
    loss = model(x).sum()
    if rank == 0:
        loss.backward()  # expect: rank-branch
