"""An optimizer keeps a share of the parameters on each rank, and skips what it does not own; norms make one number.

Style: Megatron: optimizer state of owned parameters
"""

import torch
import torch.distributed as dist


class SharedOptimizer:
    def __init__(self, model):
        self.named = dict(model.named_parameters())
        owned = list(self.named)[dist.get_rank() :: dist.get_world_size()]
        self.moments = {name: torch.zeros_like(self.named[name]) for name in owned}

    def norm(self):
        squares = torch.zeros(())
        for name, parameter in self.named.items():
            if name not in self.moments:
                continue
            square = parameter.grad.norm() ** 2
            dist.all_reduce(square)  # label: "square of a norm"
            squares = squares + square
        return squares.sqrt()


def main():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return SharedOptimizer(model).norm().item()
