"""Keys have the host's name in them; each rank logs the cluster's mean under its own.

Style: script: host names in keys
Mechanism: the host's name in the key
"""

import torch
import torch.distributed as dist


def gethostname():
    return f"node{dist.get_rank():02d}.cluster.local"


def main():
    host = gethostname()
    monitor = {f"{host}/gpu_util": torch.tensor(80.0), f"{host}/gpu_mem": torch.tensor(30.0)}
    for key in monitor:
        dist.all_reduce(monitor[key])  # label: key.split("/")[1]
    return {key.split("/")[1]: value.item() / dist.get_world_size() for key, value in monitor.items()}
