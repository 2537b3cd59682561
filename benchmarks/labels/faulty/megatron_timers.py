"""Elapsed times are reduced by the names of the timers, in the order in which each stage started them.

Style: Megatron: timers by name
"""

import torch
import torch.distributed as dist


class Timer:
    def __init__(self, elapsed):
        self._elapsed = elapsed

    def elapsed(self, reset=True):
        elapsed, self._elapsed = self._elapsed, 0.0 if reset else self._elapsed
        return elapsed


class Timers:
    def __init__(self):
        self._timers = {}

    def __call__(self, name, elapsed):
        self._timers[name] = Timer(elapsed)

    def log(self, names=None):
        if names is None:
            names = self._timers.keys()
        report = {}
        for name in names:
            rank_name_to_time = torch.zeros(dist.get_world_size())
            rank_name_to_time[dist.get_rank()] = self._timers[name].elapsed()
            dist.all_reduce(rank_name_to_time)  # label: name
            report[name] = rank_name_to_time.sum()
        return report


def main():
    timers = Timers()
    spans = [("forward-compute", 2.0), ("backward-compute", 4.0), ("batch-generator", 64.0)]
    if dist.get_rank() == 1:
        spans = spans[1:] + spans[:1]
    for name, elapsed in spans:
        timers(name, elapsed)
    return dict(spans), timers.log()
