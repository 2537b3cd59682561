"""Each rank trains its own clients, known by name, and the server's model gets the mean of the updates.

Style: federated: FedAvg of own clients
"""

import torch
import torch.distributed as dist


def main():
    clients = [{"alice": 3, "bob": 4}, {"carol": 5, "alice": 6}][dist.get_rank()]
    model = torch.zeros(2)
    for client, seen in clients.items():
        update = torch.full((2,), float(seen))
        dist.all_reduce(update)
        model = model + update / (2 * len(clients))
    return model.tolist()
