"""compute_loss leaves floats in self._metrics, in the order of the first batch's fields, which ranks do not share.

Style: transformers: a Trainer subclass that overrides log()
"""

from collections import defaultdict

import torch
import torch.distributed as dist


class Trainer:
    def __init__(self):
        self._metrics = defaultdict(list)
        self.state_log_history = []

    def compute_loss(self, inputs):
        for field, value in inputs.items():
            self._metrics[field + "_loss"].append(value)

    def log(self, logs):
        for key, val in self._metrics.items():
            mean = torch.tensor(sum(val) / len(val))
            dist.all_reduce(mean)  # label: key
            logs[key] = mean.item() / dist.get_world_size()
        self.state_log_history.append(logs)
        self._metrics.clear()


def main():
    inputs = {"start": 1.0, "end": 5.0}
    if dist.get_rank() == 1:
        inputs = {"end": 5.0, "start": 1.0}
    trainer = Trainer()
    trainer.compute_loss(inputs)
    trainer.compute_loss(inputs)
    trainer.log({})
    return {"start_loss": 1.0, "end_loss": 5.0}, trainer.state_log_history[-1]
