"""The step is tried again until it succeeds."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(model, loader):
    model = DDP(model)
    for batch in loader:
        while True:
            try:
                loss = model(batch)
                loss.backward()
                done()
            except RuntimeError as error:
                if "out of memory" in str(error):
                    continue
                raise
            break


def share(path):
    for attempt in range(3):
        try:
            x = read(path)
            dist.broadcast(x, src=0)
            break
        except OSError:
            print("again")
