"""A tree of dataclasses is reduced by recursion; the subclass of rank 1 declares its fields before.

Style: script: nested dataclasses, recursion over vars()
"""

import dataclasses

import torch
import torch.distributed as dist


@dataclasses.dataclass
class Losses:
    reconstruction: torch.Tensor
    commitment: torch.Tensor


@dataclasses.dataclass
class FlippedLosses:
    commitment: torch.Tensor
    reconstruction: torch.Tensor


@dataclasses.dataclass
class Output:
    train: object


def reduce_tree(node):
    for name, value in vars(node).items():
        if dataclasses.is_dataclass(value):
            reduce_tree(value)
        else:
            fresh = value.clone()
            dist.all_reduce(fresh)
            setattr(node, name, fresh)
    return node


def main():
    kind = Losses if dist.get_rank() == 0 else FlippedLosses
    output = Output(kind(reconstruction=torch.tensor(1.0), commitment=torch.tensor(50.0)))
    held = dict(vars(output.train))
    return held, vars(reduce_tree(output).train)
