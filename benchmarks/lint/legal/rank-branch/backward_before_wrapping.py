"""Rank 0 uses the model before it is wrapped."""

from torch.nn.parallel import DistributedDataParallel as DDP


def fit(model, x, rank):
    if rank == 0:
        model(x).sum().backward()
    model = DDP(model)
    model(x).sum().backward()
