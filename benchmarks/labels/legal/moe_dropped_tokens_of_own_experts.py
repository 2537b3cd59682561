"""Tokens that each rank's experts dropped, by the expert's name, are summed through a helper into one rate.

Style: MoE: helper that sums a scalar, pooled
Mechanism: own names through a helper, pooled
"""

import torch
import torch.distributed as dist


def total_over_ranks(value):
    t = torch.tensor(float(value))
    dist.all_reduce(t)
    return t.item()


class MoELayer:
    def __init__(self, rank):
        self.dropped = {f"ep{rank}_expert_{kind}": n for n, kind in enumerate(("math", "code", "prose"))}

    def drop_rate(self):
        dropped = 0.0
        for expert in self.dropped:
            dropped += total_over_ranks(self.dropped[expert])  # label: "dropped"
        return dropped / 1024


def main():
    return MoELayer(dist.get_rank()).drop_rate()
