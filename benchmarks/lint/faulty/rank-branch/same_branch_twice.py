"""Rank 0 runs a barrier twice, once under a further condition; neither branch completes the other."""

import torch.distributed as dist


def finish(rank, save):
    if rank == 0:
        dist.barrier()  # expect: rank-branch
    if rank == 0 and save:
        dist.barrier()  # expect: rank-branch
