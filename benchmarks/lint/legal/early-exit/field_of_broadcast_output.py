"""All ranks have the output of rank 0, and so its loss."""

import torch
import torch.distributed as dist
from comm import broadcast_output


def evaluate(model, batch):
    outputs = model(batch)
    broadcast_output(outputs)
    if torch.isnan(outputs.loss):
        return
    dist.barrier()
