"""The inner branch runs where the configuration says so, on all ranks."""

import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def save(state, sharded):
    if dist.get_rank() == 0 or sharded:
        if sharded:
            dcp.save(state, checkpoint_id="x")
