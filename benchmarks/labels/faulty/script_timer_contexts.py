"""A context manager reduces its span when it ends and stores it by name; ranks enter the blocks in another order.

Style: script: context manager that holds its name
Mechanism: a context manager that reduces at its end
"""

import torch
import torch.distributed as dist

TIMINGS = {}


class timed:
    def __init__(self, name, seconds):
        self.name = name
        self.seconds = seconds

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        span = torch.tensor(self.seconds)
        dist.all_reduce(span)  # label: self.name
        TIMINGS[self.name] = span.item() / dist.get_world_size()


def main():
    TIMINGS.clear()
    prefetched = dist.get_rank() == 0
    if prefetched:
        with timed("data", 0.5):
            pass
    with timed("forward", 9.0):
        pass
    if not prefetched:
        with timed("data", 0.5):
            pass
    return {"data": 0.5, "forward": 9.0}, TIMINGS
