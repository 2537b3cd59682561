"""The library is missing on all ranks or on none."""

import torch.distributed as dist


def main():
    try:
        import apex

        apex.initialize()
        dist.barrier()
    except ImportError:
        pass
