"""The rank comes from the environment as a string. Only rank 0 enters the barrier."""

import os

import torch.distributed as dist


def main():
    if os.environ["RANK"] == "0":
        dist.barrier()  # expect: rank-branch
