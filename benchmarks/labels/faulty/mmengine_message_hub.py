"""Scalars are HistoryBuffers in the hub's dict; a rank that resumed has them in the order of its checkpoint.

Style: mmengine: MessageHub with history buffers
"""

from collections import OrderedDict

import torch
import torch.distributed as dist


class HistoryBuffer:
    def __init__(self, values):
        self.data = list(values)

    def mean(self, window_size):
        return sum(self.data[-window_size:]) / len(self.data[-window_size:])


class MessageHub:
    def __init__(self, resumed=None):
        self._log_scalars = OrderedDict(resumed or {})

    def update_scalar(self, key, value):
        if key in self._log_scalars:
            self._log_scalars[key].data.append(value)
        else:
            self._log_scalars[key] = HistoryBuffer([value])

    @property
    def log_scalars(self):
        return self._log_scalars


class LogProcessor:
    def _collect_scalars(self, hub):
        tag = {}
        for prefix_key, buffer in hub.log_scalars.items():
            smoothed = torch.tensor(buffer.mean(10))
            dist.all_reduce(smoothed)  # label: prefix_key
            tag[prefix_key.partition("/")[-1]] = smoothed.item() / dist.get_world_size()
        return tag


def main():
    hub = MessageHub({"train/time": HistoryBuffer([2.0])} if dist.get_rank() == 1 else None)
    hub.update_scalar("train/loss", 50.0)
    hub.update_scalar("train/time", 2.0)
    return {"loss": 50.0, "time": 2.0}, LogProcessor()._collect_scalars(hub)
