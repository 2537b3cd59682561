"""Vocabulary partitions: the maximum and the sum of exponents are over partitions with other bounds.

Style: Megatron: vocabulary-parallel cross entropy
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    partition = {f"vocab[{8 * rank}:{8 * rank + 8}]": torch.arange(8.0) + rank}
    for bounds, logits in partition.items():
        logits_max = logits.max()
        dist.all_reduce(logits_max, op=dist.ReduceOp.MAX)  # label: "logits_max"
        sum_exp = (logits - logits_max).exp().sum()
        dist.all_reduce(sum_exp)  # label: "sum_exp_logits"
    return (logits_max + sum_exp.log()).item()
