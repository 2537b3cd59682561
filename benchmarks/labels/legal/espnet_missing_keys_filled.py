"""Stats lack keys on a rank, but dict.fromkeys of a fixed tuple gives all ranks the same ones.

Style: espnet: fixed keys filled with zero
Mechanism: a fixed tuple of keys
"""

import torch
import torch.distributed as dist

KEYS = ("loss", "loss_ctc", "loss_att")


def forward():
    return {"loss_att": 3.0, "loss": 3.0} if dist.get_rank() else {"loss": 9.0, "loss_ctc": 9.0}


def main():
    stats = {**dict.fromkeys(KEYS, 0.0), **forward()}
    reduced = {}
    for key, value in stats.items():
        value = torch.tensor(value)
        dist.all_reduce(value)
        reduced[key] = value
    return forward(), reduced
