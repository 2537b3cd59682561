"""The inner model takes the name of the wrapped model before rank 0 uses it."""

from torch.nn.parallel import DistributedDataParallel as DDP


def fit(model, x, rank):
    model = DDP(model)
    model(x).sum().backward()
    model = model.module
    if rank == 0:
        loss = model(x).sum()
        loss.backward()
