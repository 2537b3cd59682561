"""A property tells whether this is rank 0, which then reduces alone."""

import torch.distributed as dist


class Loop:
    @property
    def main(self):
        return dist.get_rank() == 0

    def go(self, x):
        if self.main:
            dist.all_reduce(x)  # missed: rank-branch
