"""The loss is replaced by that of the wrapped model, and rank 0 alone calls its `backward()`."""

from torch.nn.parallel import DistributedDataParallel as DDP


def fit(net, head, x, rank):
    model = DDP(net)
    loss = head(x).sum()
    loss.backward()
    loss = model(x).sum()
    if rank == 0:
        loss.backward()  # expect: rank-branch
