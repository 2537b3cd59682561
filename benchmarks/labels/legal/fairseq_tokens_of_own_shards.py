"""Each rank has shards of its own; token counts are reduced shard after shard and added up.

Style: fairseq: ntokens of own shards
"""

import torch
import torch.distributed as dist


def shards(rank):
    return {f"data-bin/shard{2 * rank + n}": torch.randint(0, 10, (5,)) for n in range(2)}


def main():
    torch.manual_seed(dist.get_rank())
    ntokens = 0
    for path, tokens in shards(dist.get_rank()).items():
        count = torch.tensor([tokens.numel()])
        dist.all_reduce(count)  # label: "ntokens"
        ntokens += count.item()
    return ntokens
