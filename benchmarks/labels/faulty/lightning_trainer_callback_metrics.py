"""A callback averages trainer.callback_metrics, reached through a chain of attributes and a property.

Style: Lightning: trainer.callback_metrics in a callback
Mechanism: a dict behind a chain of attributes
"""

import torch
import torch.distributed as dist


class LoggerConnector:
    def __init__(self, metrics):
        self._callback_metrics = metrics


class Trainer:
    def __init__(self, metrics):
        self._logger_connector = LoggerConnector(metrics)

    @property
    def callback_metrics(self):
        return self._logger_connector._callback_metrics


class SyncMetrics:
    def on_validation_end(self, trainer):
        for name in list(trainer.callback_metrics):
            tensor = trainer.callback_metrics[name].detach().to(torch.float64)
            dist.all_reduce(tensor)  # label: name
            trainer.callback_metrics[name] = tensor / dist.get_world_size()


def validate():
    out = {}
    if dist.get_rank() == 1:
        out["val_auroc"] = torch.tensor(0.75)
    out["val_loss"] = torch.tensor(12.0)
    if dist.get_rank() != 1:
        out["val_auroc"] = torch.tensor(0.75)
    return out


def main():
    trainer = Trainer(validate())
    SyncMetrics().on_validation_end(trainer)
    return validate(), trainer.callback_metrics
