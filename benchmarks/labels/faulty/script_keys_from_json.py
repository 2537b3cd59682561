"""Which metrics are reduced comes from a configuration text, that of rank 1 lists them otherwise.

Style: script: names from JSON
Mechanism: names that no program text has
"""

import json

import torch
import torch.distributed as dist

CONFIGS = ['{"report": ["loss", "lr", "tokens"]}', '{"report": ["tokens", "loss", "lr"]}']


def main():
    config = json.loads(CONFIGS[min(dist.get_rank(), 1)])
    state = {"loss": 2.0, "lr": 0.25, "tokens": 4096.0}
    out = {}
    for name in config["report"]:
        out[name] = torch.tensor(state[name])
        dist.all_reduce(out[name])  # label: name
    return state, out
