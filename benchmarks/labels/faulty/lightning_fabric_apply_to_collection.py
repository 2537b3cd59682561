"""fabric.all_reduce() is given a whole dict, and a generic function walks it in the dict's own order.

Style: Lightning: apply_to_collection with a function
Mechanism: a function that a generic walk calls
"""

from collections import OrderedDict

import torch
import torch.distributed as dist


def apply_to_collection(data, dtype, function, *args, **kwargs):
    if isinstance(data, dtype):
        return function(data, *args, **kwargs)
    if isinstance(data, dict):
        out = []
        for k, v in data.items():
            out.append((k, apply_to_collection(v, dtype, function, *args, **kwargs)))
        return OrderedDict(out)
    return data


def _all_reduce(tensor, reduce_op):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size() if reduce_op == "mean" else tensor


class Fabric:
    def all_reduce(self, data, reduce_op="mean"):
        return apply_to_collection(data, torch.Tensor, _all_reduce, reduce_op=reduce_op)


def main():
    fabric = Fabric()
    out = {"mel": torch.tensor(3.0), "duration": torch.tensor(0.25), "epoch": 4}
    if dist.get_rank() == 1:
        out = {"epoch": 4, "duration": torch.tensor(0.25), "mel": torch.tensor(3.0)}
    synced = fabric.all_reduce(out)
    return out, synced
