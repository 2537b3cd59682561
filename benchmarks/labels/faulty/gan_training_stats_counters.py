"""Counters come into a global dict when report() is first called; the discriminator's phase ran first on one rank.

Style: GAN: StyleGAN-like training_stats with global counters
"""

import torch
import torch.distributed as dist

_counters = dict()


def report(name, value):
    if name not in _counters:
        _counters[name] = torch.zeros([3])
    elems = torch.as_tensor(value).flatten().float()
    _counters[name] += torch.stack([torch.ones_like(elems).sum(), elems.sum(), elems.square().sum()])
    return value


class Collector:
    def __init__(self):
        self._moments = {}

    def update(self):
        for name in list(_counters):
            delta = _counters[name].clone()
            dist.all_reduce(delta)  # label: name
            self._moments[name] = delta
            _counters[name].zero_()

    def as_dict(self):
        return {name: (m[1] / m[0]).item() for name, m in self._moments.items()}


def main():
    _counters.clear()
    phases = [("Loss/G/loss", [1.0, 3.0]), ("Loss/D/loss", [50.0, 70.0])]
    for name, values in phases if dist.get_rank() == 0 else phases[::-1]:
        report(name, torch.tensor(values))
    collector = Collector()
    collector.update()
    return {"Loss/G/loss": 2.0, "Loss/D/loss": 60.0}, collector.as_dict()
