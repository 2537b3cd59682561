"""Rank 0 calls `backward()` of what the inner `module` has computed."""

from torch.nn.parallel import DistributedDataParallel as DDP


def fit(net, x, y, rank):
    model = DDP(net)
    loss = (model(x) - y).abs().sum()
    loss.backward()
    if rank == 0:
        x.requires_grad_()
        score = model.module(x).max()
        score.backward()
