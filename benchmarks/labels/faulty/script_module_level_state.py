"""Meters live at the level of the module, and main only calls what uses them.

Style: script: module level dict and functions
Mechanism: global variables of the module
"""

import torch
import torch.distributed as dist

METERS = {}


def meter(name):
    if name not in METERS:
        METERS[name] = torch.zeros(2)
    return METERS[name]


def step():
    if dist.get_rank() == 1:
        meter("skipped")[0] += 1
    meter("loss")[0] += 16
    meter("skipped")


def finish():
    summary = {}
    for name, m in METERS.items():
        dist.all_reduce(m)  # label: name
        summary[name] = m.sum()
    return summary


def main():
    METERS.clear()
    step()
    held = {"loss": 16, "skipped": int(dist.get_rank() == 1)}
    return held, finish()
