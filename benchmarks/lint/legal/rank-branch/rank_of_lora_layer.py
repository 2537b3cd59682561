"""The rank is that of a LoRA layer."""

import torch
import torch.distributed as dist


class LoRALinear(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def forward(self, x):
        if self.rank > 0:
            dist.all_reduce(x)
        return x
