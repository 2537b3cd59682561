"""One rank says that its iterator is at its end; the other asks. Their variables have other names.

Style: espnet: iterator_stop flags
"""

import torch
import torch.distributed as dist


def main():
    steps = 0
    batches = iter(range(3 + dist.get_rank()))
    flags = {"stop": torch.tensor(0)}
    for _ in batches:
        dist.all_reduce(flags["stop"], dist.ReduceOp.SUM)  # label: "stop"
        if flags["stop"] > 0:
            break
        steps += 1
    else:
        finished = {"exhausted": torch.tensor(1)}
        dist.all_reduce(finished["exhausted"], dist.ReduceOp.SUM)  # label: "stop"
    return steps
