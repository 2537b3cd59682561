"""Each rank has the optimizer's states of other parameters; overflow anywhere skips the step everywhere.

Style: Megatron: distributed optimizer, found_inf by own shards
"""

import torch
import torch.distributed as dist


class Shard:
    def __init__(self, rank):
        names = ("wte", "wpe", "ln_f", "head")[2 * rank % 4 :][:2]
        self.grads = {
            f"module.{name}.main_grad": torch.tensor([1.0, float("inf") if name == "head" else 1.0]) for name in names
        }

    def found_inf(self):
        found = torch.zeros(1)
        for name, grad in self.grads.items():
            inf = torch.isinf(grad).any().float().view(1)
            dist.all_reduce(inf, op=dist.ReduceOp.MAX)  # label: "found_inf"
            found = torch.maximum(found, inf)
        return bool(found.item())


def main():
    return Shard(dist.get_rank()).found_inf()
