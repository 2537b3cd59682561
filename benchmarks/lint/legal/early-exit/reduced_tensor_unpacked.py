"""The values come from a reduced tensor that is unpacked, stacked and reshaped."""

import torch
import torch.distributed as dist


def f(loss, acc):
    packed = torch.stack([loss, acc])
    dist.all_reduce(packed)
    acc, loss = packed.unbind()
    if loss.item() > 10:
        return
    (part,) = torch.split(packed, 2)
    if torch.isnan(torch.nan_to_num(torch.cat([part, packed])).sum()):
        return
    loss = torch.stack([packed, packed]).mean()
    if torch.isnan(loss.reshape(-1)) or loss > 3:
        return
    dist.barrier()
