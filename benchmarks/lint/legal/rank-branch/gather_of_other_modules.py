"""`asyncio.gather` and `torch.gather` are no collectives."""

import asyncio

import torch


async def main(rank, x, index):
    if rank == 0:
        await asyncio.gather(x)
        torch.gather(x, 0, index)
        x.scatter_(0, index, x)
