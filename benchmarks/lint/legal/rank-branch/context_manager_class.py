"""The entry lets the other ranks wait, and the exit releases them."""

import torch.distributed as dist


class MainFirst:
    def __init__(self, rank):
        self.rank = rank

    def __enter__(self):
        if self.rank != 0:
            dist.barrier()

    def __exit__(self, *error):
        if self.rank == 0:
            dist.barrier()
