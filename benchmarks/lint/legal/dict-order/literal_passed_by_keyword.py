"""The dict has literal keys, and is passed by keyword to the functions that reduce it."""

import torch.distributed as dist


def reduce_dict(losses):
    for value in losses.values():
        dist.all_reduce(value)


class Reducer:
    def reduce(self, losses):
        for value in losses.values():
            dist.all_reduce(value)


reducer = Reducer()


def train(model, batch):
    out = model(batch)
    reduce_dict(losses={"ce": out.ce, "kl": out.kl})
    reducer.reduce({"ce": out.ce, "kl": out.kl})
