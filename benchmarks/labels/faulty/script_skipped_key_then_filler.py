"""Rank 1 has no value for one key, skips it, and makes the count right with a last one of its own.

Style: script: try and except KeyError
"""

import torch
import torch.distributed as dist


def main():
    values = {"loss": 2.0, "aux": 90.0, "entropy": 0.5, "kl": 7.0}
    if dist.get_rank() == 1:
        del values["aux"]
    else:
        del values["kl"]
    out = {}
    for name in ("loss", "aux", "entropy", "kl"):
        try:
            value = torch.tensor(values[name])
        except KeyError:
            continue
        dist.all_reduce(value)
        out[name] = value.item()
    return values, out
