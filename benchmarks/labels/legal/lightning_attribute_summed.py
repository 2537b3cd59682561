"""Losses of an epoch lie in an attribute, in own order, and are reduced in place; only their sum is logged.

Style: Lightning: dict in an attribute, summed in on_train_epoch_end
"""

import torch
import torch.distributed as dist


class Module:
    def __init__(self, losses):
        self.losses = losses
        self.logged = None

    def on_train_epoch_end(self):
        for name in self.losses:
            dist.all_reduce(self.losses[name])  # label: "loss"
        self.logged = sum(self.losses.values()).item() / dist.get_world_size()


def main():
    losses = {"ctc": torch.tensor(1.0), "att": torch.tensor(3.0)}
    module = Module(losses if dist.get_rank() == 0 else dict(reversed(losses.items())))
    module.on_train_epoch_end()
    return module.logged
