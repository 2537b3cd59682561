"""log_vars differ in their values alone; a None is dropped on all ranks by the same test.

Style: mmengine: OrderedDict of log_vars
"""

from collections import OrderedDict

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    losses = OrderedDict([("loss_rpn", torch.tensor(1.0 + rank)), ("loss_mask", None), ("acc", torch.tensor(70.0))])
    log_vars = OrderedDict((k, v.clone()) for k, v in losses.items() if v is not None)
    for loss_name, loss_value in log_vars.items():
        dist.all_reduce(loss_value)
        log_vars[loss_name] = loss_value.item() / dist.get_world_size()
    return {k: v for k, v in losses.items() if v is not None}, log_vars
