"""All ranks reduce a flag after the error."""

import torch
import torch.distributed as dist


def train(model, loader):
    for batch in loader:
        bad = torch.zeros(1)
        try:
            loss = model(batch)
        except RuntimeError as error:
            if "out of memory" in str(error):
                bad.fill_(1)
            else:
                raise
        dist.all_reduce(bad)
