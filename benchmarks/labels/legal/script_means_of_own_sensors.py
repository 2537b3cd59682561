"""Every rank reads sensors of its own, in a dataclass of its own; one mean temperature is reported.

Style: script: dataclass fields of the rank's own class, pooled
Mechanism: fields of each rank's own dataclass, pooled
"""

import dataclasses

import torch
import torch.distributed as dist


@dataclasses.dataclass
class Roof:
    north: float = 10.0
    south: float = 14.0


@dataclasses.dataclass
class Cellar:
    boiler: float = 40.0
    store: float = 8.0


def main():
    readings = Roof() if dist.get_rank() == 0 else Cellar()
    temperature = 0.0
    for field in dataclasses.fields(readings):
        t = torch.tensor(getattr(readings, field.name))
        dist.all_reduce(t)  # label: "temperature"
        temperature += t.item()
    return temperature / (2 * dist.get_world_size())
