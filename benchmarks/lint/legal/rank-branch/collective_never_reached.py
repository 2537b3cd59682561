"""The barrier stands behind an error that is always raised."""

import torch.distributed as dist


def upload(path):
    raise NotImplementedError(path)
    dist.barrier()


def finish(rank):
    if rank == 0:
        try:
            upload("last.pt")
        except NotImplementedError:
            print("not uploaded")
