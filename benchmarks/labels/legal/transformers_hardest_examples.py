"""The rank keeps a board of its hardest examples; the loss that each had is also averaged over ranks for a threshold.

Style: transformers: dict of the rank's own hardest examples, sorted
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    board = {("q-%d-%d" % (rank, n)): 1.0 + n * (1 - 2 * rank) for n in range(3)}
    threshold = []
    for example, loss in sorted(board.items(), key=lambda kv: -kv[1]):
        t = torch.tensor(loss)
        dist.all_reduce(t)  # label: "n-th hardest"
        threshold.append(t.item() / dist.get_world_size())
    return threshold
