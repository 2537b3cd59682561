"""Every rank has callbacks of its own; after each one all ranks agree whether to stop.

Style: transformers: control flow of callbacks
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    callbacks = (
        {"early_stopping": lambda step: step > 3, "flow": lambda step: False}
        if rank == 0
        else {"flow": lambda step: False, "memory_limit": lambda step: step > 5}
    )
    control = {"should_training_stop": False}
    for step in range(8):
        for name, callback in callbacks.items():
            flag = torch.tensor(int(callback(step)))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if flag.item():
                control["should_training_stop"] = True
        if control["should_training_stop"]:
            break
    return step
