"""The lists of losses and metrics come from the constructor's arguments."""

import torch
import torch.distributed as dist


class Criterion(torch.nn.Module):
    def __init__(self, losses, metrics, w_kl_loss=0.0):
        self.losses = losses
        self.metrics = [one for one in metrics]
        self.outputs = torch.nn.ModuleList([torch.nn.L1Loss()])
        self.w_kl_loss = w_kl_loss

    def forward(self, n):
        if len(self.losses) > 0 or self.w_kl_loss > 0 or len(self.outputs) > 0:
            dist.all_reduce(n)
        if len(self.metrics) == 0:
            return n
        dist.all_reduce(n)
