"""The error is put into a queue for another process."""

import torch.distributed as dist


def work(number, model, batch, queue):
    try:
        loss = model(batch)
        dist.all_reduce(loss)
        output = (number, loss)
    except Exception as e:
        output = (number, e)
    queue.put(output)
