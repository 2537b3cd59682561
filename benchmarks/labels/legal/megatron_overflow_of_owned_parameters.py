"""Each rank looks for overflow in the gradients that it owns, and remembers by name; a step is skipped for any of them.

Style: Megatron: found_inf of owned parameters, kept by name
"""

import torch
import torch.distributed as dist


def main():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    owned = [name for name, _ in model.named_parameters()][dist.get_rank() :: dist.get_world_size()]
    overflow = {}
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        if name not in owned:
            continue
        bad = (~torch.isfinite(parameter.grad)).any().float()
        dist.all_reduce(bad)  # label: "overflow"
        overflow[name] = bad.item()
    return any(overflow.values())
