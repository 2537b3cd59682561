"""The first stage's word embeddings and the last stage's output layer are tied: their gradients are to be summed.

Style: Megatron: allreduce_word_embedding_grads
Mechanism: other parameters of pipeline stages, stored back
"""

import torch
import torch.distributed as dist
from torch import nn


class FirstStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(8, 4)


class LastStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.output_layer = nn.Linear(4, 8, bias=False)


def main():
    model = FirstStage() if dist.get_rank() == 0 else LastStage()
    shared = ("word_embeddings.weight", "output_layer.weight")
    for name, param in model.named_parameters():
        if name in shared:
            param.grad = torch.ones_like(param)
            dist.all_reduce(param.grad)  # label: "tied embedding"
    return sum(param.grad.sum().item() for param in model.parameters())
