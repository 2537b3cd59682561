"""state_dict() of a metric is walked while its items are taken off it; an older class has them in another order.

Style: torcheval: state_dict() and popitem
"""

import torch
import torch.distributed as dist


class Throughput:
    def __init__(self, legacy):
        self.num_total = torch.tensor(1000.0)
        self.weighted_sum = torch.tensor(8.0)
        self.legacy = legacy

    def state_dict(self):
        if self.legacy:
            return {"weighted_sum": self.weighted_sum, "num_total": self.num_total}
        return {"num_total": self.num_total, "weighted_sum": self.weighted_sum}


def synced_state(metric):
    remaining = {k: v.detach().clone() for k, v in metric.state_dict().items()}
    merged = {}
    while remaining:
        key, tensor = remaining.popitem()
        dist.all_reduce(tensor)  # label: key
        merged[key] = tensor
    return merged


def main():
    metric = Throughput(legacy=dist.get_rank() == 1)
    return metric.state_dict(), synced_state(metric)
