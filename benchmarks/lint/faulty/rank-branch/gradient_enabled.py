"""The features come from the wrapped model with gradients enabled, so `backward()` of the probe reduces."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def fit(net, probe, x, rank):
    wrapped = DDP(net)
    with torch.set_grad_enabled(True):
        features = wrapped(x)
    if rank == 0:
        probe(features).sum().backward()  # expect: rank-branch
