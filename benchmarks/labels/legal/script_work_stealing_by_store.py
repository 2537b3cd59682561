"""Ranks take named jobs from a shared counter, and after each job agree on how much is done.

Style: script: work stealing
"""

import torch
import torch.distributed as dist

JOBS = ["tokenize", "align", "filter", "dedup"]


def main():
    rank = dist.get_rank()
    queue = JOBS[rank::2]
    done = 0
    results = {}
    while queue:
        job = queue.pop(0)
        results[job] = len(job)
        progress = torch.tensor(1)
        dist.all_reduce(progress)
        done += progress.item()
        print(f"{job} finished, {done} of {len(JOBS)}")
    return done
