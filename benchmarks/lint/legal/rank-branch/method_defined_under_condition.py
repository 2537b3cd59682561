"""The function that rank 0 calls is of another file, and not the method of the same name."""

import torch.distributed as dist
from files import write


class Checkpoint:
    if dist.is_available():

        def write(self):
            dist.barrier()


def finish(rank):
    if rank == 0:
        write("last.pt")
