"""A rank that fails before the barrier sets a flag that keeps another value without an error, and its caller exits."""

import sys

import torch
import torch.distributed as dist


class Groups:
    healthy = True

    @staticmethod
    def destroy():
        try:
            torch.cuda.synchronize()
            dist.barrier()
        except Exception:
            Groups.healthy = False
            return
        release_groups()
        Groups.healthy = True


def main():
    Groups.destroy()
    if not Groups.healthy:
        sys.exit(1)
