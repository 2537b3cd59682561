"""All metrics go into one vector to save collectives; the order of the dict decides where each stands.

Style: script: torch.tensor(list(metrics.values()))
Cannot be seen: the values are put into one tensor before the collective
"""

import torch
import torch.distributed as dist


def main():
    metrics = {"hits": 3.0, "misses": 70.0} if dist.get_rank() == 0 else {"misses": 70.0, "hits": 3.0}
    flat = torch.tensor(list(metrics.values()))
    dist.all_reduce(flat)  # label: "|".join(metrics)
    return metrics, dict(zip(metrics, flat.tolist()))
