"""Each rank trains its own clients; their updates are summed, one client per rank at a time, into the server's model.

Style: federated: updates by client id
"""

import torch
import torch.distributed as dist


def train(client):
    return torch.full((3,), float(sum(map(ord, client)) % 5))


def main():
    clients = ["hospital-a", "hospital-b"] if dist.get_rank() == 0 else ["clinic-x", "clinic-y"]
    server = torch.zeros(3)
    for client in clients:
        delta = train(client)
        dist.all_reduce(delta)  # label: "client update"
        server += delta / (len(clients) * dist.get_world_size())
    return server.tolist()
