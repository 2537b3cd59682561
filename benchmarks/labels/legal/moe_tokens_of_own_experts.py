"""Each rank owns other experts; tokens they got are counted and pooled to see how many were dropped.

Style: MoE: experts named by the rank that owns them
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    experts = {f"experts.{2 * rank + n}": torch.tensor(10 + n) for n in range(2)}
    routed = torch.tensor(0)
    for name, tokens in experts.items():
        tokens = tokens.clone()
        dist.all_reduce(tokens)  # label: "tokens of an expert"
        routed += tokens
    return routed.item()
