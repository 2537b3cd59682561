"""Each batch is of a domain, counted locally; the loss of the step is the mean over ranks, whatever the domain.

Style: nanoGPT: domain drawn by each rank
"""

import collections

import torch
import torch.distributed as dist

LOSS = {"web": 3.0, "code": 1.0, "books": 2.0}


def main():
    domains = [["web", "code", "web"], ["code", "books", "web"]][dist.get_rank()]
    seen = collections.Counter()
    running = 0.0
    for step, domain in enumerate(domains):
        seen[domain] += 1
        loss = torch.tensor(LOSS[domain])
        dist.all_reduce(loss)
        running = 0.9 * running + 0.1 * loss.item()
        print(f"step {step}: loss {loss.item() / 2:.2f} (this rank: {domain})")
    return running
