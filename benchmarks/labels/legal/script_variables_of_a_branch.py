"""A rank without a batch reduces a variable called zero where the others reduce loss.

Style: script: other variables in the branches
Mechanism: another variable in each branch
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    batches = [[1.0, 2.0], [3.0]][min(rank, 1)]
    history = []
    for n in range(2):
        if n < len(batches):
            loss = torch.tensor(batches[n])
            dist.all_reduce(loss)
            history.append(loss.item())
        else:
            zero = torch.zeros(())
            dist.all_reduce(zero)
            history.append(zero.item())
    return history
