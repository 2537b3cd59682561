"""The loop is code that a notebook-like runner executes from a string.

Style: script: exec without source
Mechanism: code without source text
Cannot be seen: the code is executed from a string and has no source
"""

import torch
import torch.distributed as dist

CELL = """
for name in stats:
    dist.all_reduce(stats[name])
"""


def make():
    stats = {"wer": torch.tensor(10.0), "rtf": torch.tensor(0.125)}
    return stats if dist.get_rank() == 0 else dict(reversed(stats.items()))


def main():
    stats = make()
    exec(CELL, {"stats": stats, "dist": dist})
    return make(), stats
