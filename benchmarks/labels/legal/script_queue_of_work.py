"""Each rank works off a queue of jobs of its own and reduces each job's cost into one budget.

Style: script: deque of (job, cost)
"""

from collections import deque

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    queue = deque((f"job-{rank}-{n}", float(n)) for n in range(4))
    spent = 0.0
    while queue:
        job, cost = queue.popleft()
        cost = torch.tensor(cost)
        dist.all_reduce(cost)  # label: "cost"
        spent += cost.item()
    return spent
