"""The metrics are told not to synchronize, or to do so in a group."""

import torch.distributed as dist
from torchmetrics import Accuracy, MetricCollection


def f(rank, x, g):
    if rank == 0:
        alone = MetricCollection([Accuracy(task="binary", sync_on_compute=False)])
        gathered = Accuracy(task="binary", distributed_available_fn=lambda: False)
        grouped = Accuracy(task="binary", process_group=g)
        print(alone.compute(), gathered.compute(), grouped.compute())
