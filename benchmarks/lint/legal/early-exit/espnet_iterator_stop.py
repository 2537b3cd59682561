"""The ranks agree in each step on whether any of them has run out of batches."""

import torch


def train(loader, model, distributed):
    iterator_stop = torch.tensor(0)
    for batch in loader:
        if distributed:
            torch.distributed.all_reduce(iterator_stop)
            if iterator_stop > 0:
                break
        model(batch)
    else:
        if distributed:
            iterator_stop.fill_(1)
            torch.distributed.all_reduce(iterator_stop)
