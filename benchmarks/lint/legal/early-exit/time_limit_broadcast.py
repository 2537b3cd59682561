"""Rank 0 measures the time, and broadcasts whether it is over."""

import time

import torch.distributed as dist


def train(self, loader, rank):
    while True:
        for batch in loader:
            if self.args.time:
                self.stop = time.time() - self.start > self.args.time
                if rank != -1:
                    stop = [self.stop if rank == 0 else None]
                    dist.broadcast_object_list(stop, 0)
                    self.stop = stop[0]
                if self.stop:
                    break
            dist.all_reduce(step(batch))
        if self.stop:
            break
