"""Rank 0 stops early; a second model in the same loop runs without a gradient."""

import torch
from torch.nn.parallel import DistributedDataParallel


def train(args, model, teacher, loader, patience):
    model = DistributedDataParallel(model)
    for batch in loader:
        with torch.no_grad():
            target = teacher(batch)
        loss = model(batch, target)
        loss.backward()
        if args.local_rank in [-1, 0] and too_long(patience):
            return  # expect: early-exit
