"""Token counts of the rank's own batch: the processor of rank 1 put the mask before the ids.

Style: transformers: batch fields in another order, counts pooled
"""

import torch
import torch.distributed as dist


def main():
    inputs = {"input_ids": torch.ones(2, 8), "attention_mask": torch.ones(2, 8)}
    if dist.get_rank() == 1:
        inputs = {"attention_mask": torch.ones(2, 8), "input_ids": torch.ones(2, 8)}
    elements = 0
    for _name, tensor in inputs.items():
        numel = torch.tensor(tensor.numel())
        dist.all_reduce(numel)  # label: "numel of a field"
        elements += int(numel)
    return elements
