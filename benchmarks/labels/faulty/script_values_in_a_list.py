"""The values are a list whose order only the author knows, and rank 1's code was changed.

Style: script: list of values without names
Mechanism: a list of values without names
Cannot be seen: the names come after the reduction, by position
"""

import torch
import torch.distributed as dist


def main():
    loss, accuracy = torch.tensor(2.0), torch.tensor(75.0)
    values = [loss, accuracy] if dist.get_rank() == 0 else [accuracy, loss]
    held = {"loss": 2.0, "accuracy": 75.0}
    for value in values:
        dist.all_reduce(value)
    names = ["loss", "accuracy"] if dist.get_rank() == 0 else ["accuracy", "loss"]
    return held, {name: value.item() / dist.get_world_size() for name, value in zip(names, values)}
