"""Two versions of the same dataclass have their fields in another order.

Style: accelerate: dataclass of meters, dataclasses.fields
Mechanism: fields of a dataclass, read by getattr
"""

import dataclasses

import torch
import torch.distributed as dist


@dataclasses.dataclass
class Meters:
    loss: float = 1.0
    tokens: float = 512.0


@dataclasses.dataclass
class MetersV2:
    tokens: float = 512.0
    loss: float = 1.0


def average(meters):
    for field in dataclasses.fields(meters):
        t = torch.tensor(getattr(meters, field.name))
        dist.all_reduce(t)
        setattr(meters, field.name, t.item() / dist.get_world_size())
    return meters


def main():
    meters = Meters() if dist.get_rank() == 0 else MetersV2()
    held = dataclasses.asdict(meters)
    return held, dataclasses.asdict(average(meters))
