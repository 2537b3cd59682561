"""Hooks stand in a registry by name, in the order of registration, which differs; each takes part in one vote.

Style: mmengine: hooks registered by plugins
"""

import torch
import torch.distributed as dist

HOOKS = {}


def register(name):
    def keep(function):
        HOOKS[name] = function
        return function

    return keep


def main():
    HOOKS.clear()
    names = ["checkpoint", "ema"] if dist.get_rank() == 0 else ["ema", "checkpoint"]
    for name in names:
        register(name)(lambda: True)
    ready = True
    for name, hook in HOOKS.items():
        ok = torch.tensor(float(hook()))
        dist.all_reduce(ok, op=dist.ReduceOp.MIN)
        ready = ready and bool(ok)
    return ready
