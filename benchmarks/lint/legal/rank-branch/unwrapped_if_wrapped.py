"""The model is unwrapped where it is wrapped, before rank 0 uses it."""

from torch.nn.parallel import DistributedDataParallel as DDP


def fit(model, x, rank):
    model = DDP(model)
    model(x).sum().backward()
    model = model.module if isinstance(model, DDP) else model
    if rank == 0:
        model(x).sum().backward()
