"""Copies of the model's buffers are reduced to see how far the ranks drifted; each rank leaves out another buffer.

Style: script: clones of the model's own buffers
"""

import torch
import torch.distributed as dist


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("running_mean", "running_var", "momentum"):
            self.register_buffer(name, torch.ones(3))


def main():
    model, drift = Model(), []
    skipped = "running_mean" if dist.get_rank() == 0 else "momentum"
    for name, buffer in model.named_buffers():
        if name == skipped:
            continue
        copy = buffer.clone()
        dist.all_reduce(copy)  # label: "drift"
        drift.append((copy / dist.get_world_size() - buffer).abs().max().item())
    return max(drift)
