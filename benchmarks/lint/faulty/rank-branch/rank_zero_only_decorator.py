"""The function runs on rank 0 alone because of its decorator, and enters a barrier."""

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only


@rank_zero_only
def save(path):
    dist.barrier()  # expect: rank-branch
