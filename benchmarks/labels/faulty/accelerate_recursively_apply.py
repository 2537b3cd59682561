"""reduce() walks nested logs with recursively_apply; a key of rank 1 is named after the adapter it trains.

Style: accelerate: recursively_apply over nested logs
"""

import torch
import torch.distributed as dist


def is_torch_tensor(tensor):
    return isinstance(tensor, torch.Tensor)


def recursively_apply(func, data, *args, test_type=is_torch_tensor, **kwargs):
    if isinstance(data, dict):
        return {k: recursively_apply(func, v, *args, test_type=test_type, **kwargs) for k, v in data.items()}
    elif isinstance(data, (tuple, list)):
        return type(data)(recursively_apply(func, o, *args, test_type=test_type, **kwargs) for o in data)
    elif test_type(data):
        return func(data, *args, **kwargs)
    return data


def reduce(tensor, reduction="mean", scale=1.0):
    def _reduce_across_processes(tensor, reduction="mean", scale=1.0):
        cloned_tensor = tensor.clone()
        dist.all_reduce(cloned_tensor, dist.ReduceOp.SUM)
        if reduction == "mean":
            cloned_tensor /= dist.get_world_size()
        return cloned_tensor * scale

    return recursively_apply(_reduce_across_processes, tensor, reduction=reduction, scale=scale)


def logs():
    adapter = "lora" if dist.get_rank() == 0 else "ia3"
    size = 1.0 if adapter == "lora" else 512.0
    return {"train": {"loss": torch.tensor(2.0), f"norm_{adapter}": torch.tensor(size)}}


def main():
    return logs(), reduce(logs())
