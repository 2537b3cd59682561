"""A function asserts a variable that has the name of the attribute that the handler sets."""

import torch.distributed as dist


class Meter:
    def update(self, net, batch):
        try:
            self.value = net(batch)
            dist.all_reduce(self.value)  # expect: swallowed-error
        except RuntimeError:
            self.value = None


def show(value):
    assert value is not None
    print(value)
