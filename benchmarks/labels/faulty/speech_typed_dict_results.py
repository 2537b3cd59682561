"""Scores of a TTS model are a TypedDict that a builder fills in the order of its modules.

Style: speech: TypedDict, async handles in a list of tuples
"""

from typing import TypedDict

import torch
import torch.distributed as dist


class Scores(TypedDict, total=False):
    mcd: torch.Tensor
    f0_rmse: torch.Tensor


def build(f0_first: bool) -> Scores:
    mcd, f0 = torch.tensor(5.0), torch.tensor(40.0)
    return Scores(f0_rmse=f0, mcd=mcd) if f0_first else Scores(mcd=mcd, f0_rmse=f0)


def main():
    f0_first = dist.get_rank() == 1
    scores = build(f0_first)
    pending = []
    for key, value in scores.items():
        work = dist.all_reduce(value, async_op=True)  # label: key
        pending.append((key, value, work))
    final = {}
    for key, value, work in pending:
        work.wait()
        final[key] = value.item() / dist.get_world_size()
    return build(f0_first), final
