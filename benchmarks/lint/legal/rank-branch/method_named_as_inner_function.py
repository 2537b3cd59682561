"""A function inside of a method has the name of a method of another class's making, which runs no collective."""

import torch.distributed as dist
from training import Base


class Trainer(Base):
    def finish(self, rank):
        def save():
            dist.barrier()

        save()
        if rank == 0:
            self.save()
