"""The main process alone calls a method that its base class defines, and that enters a barrier."""

import torch.distributed as dist


class Base:
    def sync(self):
        dist.barrier()


class Trainer(Base):
    def save(self):
        if self.is_main_process:
            self.sync()  # expect: rank-branch
