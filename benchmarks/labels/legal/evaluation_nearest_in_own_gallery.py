"""Each rank holds a part of the gallery; the best similarity over all parts is the answer.

Style: evaluation: MAX over gallery shards with names
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    gallery = {"paris6k": torch.tensor([0.25, 0.5]), "oxford5k": torch.tensor([0.75, 0.125])}
    mine = dict([list(gallery.items())[rank % 2]])
    best = []
    for shard, similarity in mine.items():
        top = similarity.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX)  # label: "similarity"
        best.extend(top.tolist())
    return best
