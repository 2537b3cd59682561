"""A rank whose evaluation fails prints the error and goes on without the reduction."""

import torch.distributed as dist


def evaluate(model, batch):
    try:
        score = model.evaluate(batch)
        dist.all_reduce(score)  # expect: swallowed-error
    except Exception as error:
        print("skipped", error)
