"""The same keys in the same order on all ranks, with a None that all ranks have.

Style: espnet: recursive average over nested stats
"""

import torch
import torch.distributed as dist


def recursive_sum(obj, weight):
    if isinstance(obj, (tuple, list)):
        return type(obj)(recursive_sum(v, weight) for v in obj)
    if isinstance(obj, dict):
        return {k: recursive_sum(v, weight) for k, v in obj.items()}
    if obj is None:
        return None
    obj = (obj * weight).sum()
    dist.all_reduce(obj)
    return obj


def stats():
    rank = dist.get_rank()
    return {"loss": torch.tensor(1.0 + rank), "acc": {"ctc": torch.tensor(0.5), "att": torch.tensor(0.75)}, "cer": None}


def main():
    return recursive_sum(stats(), torch.ones(()))
