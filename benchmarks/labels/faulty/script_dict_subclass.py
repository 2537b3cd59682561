"""Stats are a dict with attribute access; ranks fill it in another order.

Style: script: addict-like subclass of dict
Mechanism: a subclass of dict
"""

import torch
import torch.distributed as dist


class AttrDict(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self[name] = value


def fill():
    stats = AttrDict()
    if dist.get_rank() == 0:
        stats.kl = torch.tensor(0.5)
        stats.recon = torch.tensor(200.0)
    else:
        stats.recon = torch.tensor(200.0)
        stats.kl = torch.tensor(0.5)
    return stats


def main():
    stats = fill()
    for k, v in stats.items():
        dist.all_reduce(v)  # label: k
    return fill(), stats
