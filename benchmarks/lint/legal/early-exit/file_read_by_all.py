"""No rank writes the file that all of them look for."""

import os

import torch.distributed as dist


def resume(path, scores):
    if os.path.exists(path):
        return load(path)
    dist.barrier()
    return train()
