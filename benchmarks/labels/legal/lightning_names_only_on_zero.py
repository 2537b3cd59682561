"""Rank zero loops over items to log, the others over values; the model logs in the same order everywhere.

Style: Lightning: logger connector
"""

import torch
import torch.distributed as dist


class Trainer:
    def __init__(self):
        self.callback_metrics = {}

    @property
    def is_global_zero(self):
        return dist.get_rank() == 0

    def log_metrics(self):
        logged = {}
        if self.is_global_zero:
            for name, value in self.callback_metrics.items():
                dist.all_reduce(value)
                logged[name] = value.item()
        else:
            for value in self.callback_metrics.values():
                dist.all_reduce(value)
        return logged


def main():
    trainer = Trainer()
    trainer.callback_metrics = {"train/loss": torch.tensor(1.0), "train/acc": torch.tensor(0.5)}
    return trainer.log_metrics()
