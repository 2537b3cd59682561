"""Rank 0 alone wraps the model, which broadcasts its parameters."""

from torch.nn.parallel import DistributedDataParallel as DDP


def wrap(model, rank):
    if rank == 0:
        model = DDP(model)  # expect: rank-branch
    return model
