"""Every rank but the last enters the barrier: the constant comes from the world size."""

import os

import torch.distributed as dist

LAST = int(os.environ["WORLD_SIZE"]) - 1


class Writer:
    def close(self):
        if self.rank != LAST:
            dist.barrier()  # expect: rank-branch
