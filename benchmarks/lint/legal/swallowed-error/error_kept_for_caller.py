"""The error is added to a list of the caller."""

import torch.distributed as dist


def attempt(model, batch, errors):
    try:
        loss = model(batch)
        dist.all_reduce(loss)
    except Exception as e:
        errors.append({"error": e})
