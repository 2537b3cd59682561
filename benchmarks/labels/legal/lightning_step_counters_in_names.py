"""Names have the global step in them, and rank 1, which was resumed from another checkpoint, counts differently.

Style: Lightning: generated names with a step counter
"""

import torch
import torch.distributed as dist


class Logger:
    def __init__(self):
        self.rows = {}

    def log(self, name, value):
        self.rows[name] = value


def main():
    logger = Logger()
    first = 0 if dist.get_rank() == 0 else 1000
    losses = {f"train_loss_step{first + n}": torch.tensor(float(n)) for n in range(3)}
    for name, loss in losses.items():
        dist.all_reduce(loss)  # label: "train_loss"
        logger.log(name, loss.item())
    return logger.rows
