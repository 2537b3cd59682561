"""Floating-point entries of state_dict() are averaged in its order; one client's model was loaded key by key.

Style: federated: state_dict() items
Mechanism: items of state_dict()
"""

import torch
import torch.distributed as dist

SHAPE = 2


def local_state():
    state = {"encoder.w": torch.full((SHAPE,), 1.0), "decoder.w": torch.full((SHAPE,), 80.0), "steps": 3}
    if dist.get_rank() == 1:
        state = {key: state[key] for key in sorted(state)}
    return state


def fedavg(state):
    averaged = {}
    for key, tensor in state.items():
        if not torch.is_tensor(tensor):
            averaged[key] = tensor
            continue
        tensor = tensor.mul(1 / dist.get_world_size())
        dist.all_reduce(tensor)  # label: key
        averaged[key] = tensor
    return averaged


def main():
    averaged = fedavg(local_state())
    held = {"encoder.w": 1.0, "decoder.w": 80.0}
    return held, {key: averaged[key].mean() for key in held}
