"""Losses per domain of the mixture; domains are met as the loader draws them, kept with walrus and get().

Style: nanoGPT: losses by domain of a data mixture
"""

import torch
import torch.distributed as dist

MIX = [("code", 1.25), ("books", 2.5), ("web", 3.75)]


def main():
    rank = dist.get_rank()
    domain_loss = {}
    for domain, loss in MIX if rank != 1 else (MIX[2], MIX[0], MIX[1]):
        if (seen := domain_loss.get(domain)) is None:
            seen = domain_loss[domain] = torch.zeros(1)
        seen += loss
    lossf = {}
    for domain in domain_loss.keys():
        dist.all_reduce(tensor := domain_loss[domain].clone())  # label: domain
        lossf[domain] = tensor.item() / dist.get_world_size()
    return dict(MIX), lossf
