"""Tensors are scattered and sent under the names that each side has for them.

Style: script: scatter, send and recv under other names
"""

import torch
import torch.distributed as dist


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {"inbox": torch.empty(2)} if rank else {"own_part": torch.empty(2)}
    outgoing = {"parts": [torch.full((2,), float(n)) for n in range(world)]}
    for name in mine:
        dist.scatter(mine[name], outgoing["parts"] if rank == 0 else None, src=0)
    if rank == 1:
        reply = {"grad": mine["inbox"] * 2}
        dist.send(reply["grad"], dst=0)
    elif rank == 0:
        received = {"activation_grad": torch.empty(2)}
        dist.recv(received["activation_grad"], src=1)
        return received["activation_grad"].tolist()
    return None
