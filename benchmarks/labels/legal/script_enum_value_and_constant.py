"""One rank's plugin writes the split as an enum's member, the other as its value.

Style: script: enum members and their values
Mechanism: one name written in two ways
"""

import enum

import torch
import torch.distributed as dist


class Split(enum.Enum):
    TRAIN = "train"
    VALID = "valid"


def main():
    losses = {Split.TRAIN: torch.tensor(1.0), Split.VALID: torch.tensor(2.0)}
    if dist.get_rank() == 1:
        losses = {split.value: loss for split, loss in losses.items()}
    out = {}
    for split, loss in losses.items():
        dist.all_reduce(loss)
        out[split] = loss.item()
    return list(out.values())
