"""Batches of equal size end with a smaller one on all ranks."""

from torch.nn.parallel import DistributedDataParallel as DDP


def train(net, loader, batch_size):
    net = DDP(net)
    for batch in loader:
        if len(batch) < batch_size:
            continue
        net(batch).backward()
