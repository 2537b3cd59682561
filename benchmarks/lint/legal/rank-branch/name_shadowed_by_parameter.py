"""The parameter has the name of a function that enters a barrier."""

import torch.distributed as dist


def evaluate(model):
    dist.barrier()


def main(rank, evaluate):
    if rank == 0:
        evaluate()
