"""The errors are kept, but only their number is returned."""

import torch.distributed as dist


def run(model, batches):
    errors = []
    for batch in batches:
        try:
            loss = model(batch)
            dist.all_reduce(loss)  # missed: swallowed-error
        except Exception as e:
            errors.append(e)
    return len(errors)
