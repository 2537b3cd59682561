"""The norm of the reduced gradients is equal on all ranks, so all of them return together."""

import torch
import torch.distributed as dist


def step(model, optimizer, max_norm):
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not torch.isfinite(grad_norm):
        return
    optimizer.step()
    dist.barrier()
