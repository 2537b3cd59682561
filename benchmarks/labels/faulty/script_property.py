"""The tracker hands out its sums through a property that puts what changed last at the end.

Style: script: property of a tracker
Mechanism: a property that makes a dict
"""

import torch
import torch.distributed as dist


class Tracker:
    def __init__(self):
        self._sums = {}

    def add(self, name, value):
        self._sums[name] = self._sums.pop(name, torch.zeros(())) + value

    @property
    def sums(self):
        return self._sums


def run():
    tracker = Tracker()
    tracker.add("tokens", 100.0)
    tracker.add("loss", 2.0)
    if dist.get_rank() == 1:
        tracker.add("tokens", 100.0)
    return tracker


def main():
    tracker = run()
    for name in tracker.sums:
        dist.all_reduce(tracker.sums[name])  # label: name
    return run().sums, tracker.sums
