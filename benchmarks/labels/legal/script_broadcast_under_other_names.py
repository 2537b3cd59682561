"""Rank 0 sends from its state dict, the others receive into buffers that they call by other names.

Style: script: broadcast of differently named tensors
Mechanism: broadcast under other names
"""

import torch
import torch.distributed as dist


def main():
    if dist.get_rank() == 0:
        state = {"encoder.weight": torch.ones(3), "encoder.bias": torch.zeros(3)}
    else:
        state = {"recv_0": torch.empty(3), "recv_1": torch.empty(3)}
    for name in state:
        dist.broadcast(state[name], src=0)
    return [value.sum().item() for value in state.values()]
