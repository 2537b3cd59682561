"""Routers count tokens in buffers; named_buffers() follows the order in which layers were added on each rank.

Style: MoE: register_buffer and named_buffers
Mechanism: named_buffers() of a module
"""

import torch
import torch.distributed as dist
from torch import nn


class Router(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.register_buffer("tokens_per_expert", torch.full((4,), tokens))


class Model(nn.Module):
    def __init__(self, shared_first):
        super().__init__()
        if shared_first:
            self.shared_router, self.sparse_router = Router(1.0), Router(30.0)
        else:
            self.sparse_router, self.shared_router = Router(30.0), Router(1.0)


def main():
    model = Model(shared_first=dist.get_rank() == 1)
    load = {}
    with torch.no_grad():
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("tokens_per_expert"):
                dist.all_reduce(buffer, op=dist.ReduceOp.SUM)  # label: buffer_name
                load[buffer_name] = buffer.sum()
    return {"shared_router.tokens_per_expert": 4.0, "sparse_router.tokens_per_expert": 120.0}, load
