"""A rank whose loss is not finite skips `backward()` of the wrapped model."""

import math

from torch.nn.parallel import DistributedDataParallel as DDP


def train(net, loader, optimizer):
    net = DDP(net)
    for x, y in loader:
        loss = criterion(net(x), y)
        if not math.isfinite(loss.item()):
            print("skipping")
            continue  # expect: early-exit
        loss.backward()
        optimizer.step()
