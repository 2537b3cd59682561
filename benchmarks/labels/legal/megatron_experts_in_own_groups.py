"""Each rank has a group of its own for its expert; names differ, and so do the groups.

Style: Megatron: expert-parallel groups
Mechanism: each rank's own process group
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    groups = [dist.new_group([n]) for n in range(dist.get_world_size())]
    grads = {f"local_experts.{rank}.fc{n}": torch.ones(2) for n in (1, 2)}
    for name in grads:
        dist.all_reduce(grads[name], group=groups[rank])
    dist.destroy_process_group(groups[rank])
    return sum(g.sum().item() for g in grads.values())
