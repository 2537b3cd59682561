"""A method of the object makes its total equal on all ranks."""

import torch.distributed as dist


class Average:
    def share(self):
        dist.all_reduce(self.total_loss)

    def add(self, loss):
        self.total_loss += loss
        self.share()
        if self.total_loss.item() > 100:
            dist.barrier()
