"""Each rank's run has an id of its own, under which it keeps its copy of the global loss.

Style: script: uuid keys
"""

import uuid

import torch
import torch.distributed as dist


def main():
    run = str(uuid.uuid4())
    history = {run: torch.tensor([1.0, 2.0])}
    for key, value in history.items():
        dist.all_reduce(value)  # label: "history"
        history[key] = value / dist.get_world_size()
    return list(history.values())[0].tolist()
