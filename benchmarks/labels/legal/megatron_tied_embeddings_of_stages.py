"""The first stage of a pipeline and the last hold one matrix under two names, and sum its gradient.

Style: Megatron: tied embeddings of two pipeline stages
"""

import torch
import torch.distributed as dist

TIED = ("embed.weight", "head.weight")


class Stage(torch.nn.Module):
    def __init__(self, is_first):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        if is_first:
            self.embed = torch.nn.Embedding(6, 4)
        else:
            self.head = torch.nn.Linear(4, 6, bias=False)


def main():
    stage = Stage(dist.get_rank() == 0)
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    for name, parameter in stage.named_parameters():
        if name in TIED:
            dist.all_reduce(parameter.grad)  # label: "tied"
    return sum(parameter.grad.sum().item() for parameter in stage.parameters())
