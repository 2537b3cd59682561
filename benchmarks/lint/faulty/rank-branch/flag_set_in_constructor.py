"""The constructor stores whether this is rank 0, and a method reduces where that holds."""

import torch.distributed as dist


class Loop:
    def __init__(self):
        self.verbose = dist.get_rank() == 0

    def go(self, x):
        if self.verbose:
            dist.all_reduce(x)  # expect: rank-branch
