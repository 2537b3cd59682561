"""The loss comes from the wrapped model in either precision; where it is NaN the rank skips `backward()`."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, net):
        self.model = DDP(net)

    def fit(self, batches, scaler, is_half):
        model = self.model
        for batch in batches:
            losses = {}
            if is_half:
                with torch.autocast("cuda"):
                    losses["ce"] = model(batch)
            else:
                losses["ce"] = model(batch)
            loss = sum(losses.values())
            loss /= 2
            if torch.isnan(loss):
                continue  # expect: early-exit
            scaler.scale(loss).backward()
