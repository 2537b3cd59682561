"""Ranks train different tasks with batches of their own size; their sum scales the learning rate.

Style: multi-task: a look-up by task, the result is used for all
"""

import torch
import torch.distributed as dist

BATCH = {"ner": 16, "pos": 48}


def main():
    task = "ner" if dist.get_rank() == 0 else "pos"
    batch = {name: torch.tensor(size) for name, size in BATCH.items()}
    dist.all_reduce(batch[task])  # label: "samples"
    global_batch = batch[task].item()
    return 1e-4 * global_batch / 64
