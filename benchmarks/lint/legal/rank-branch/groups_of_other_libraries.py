"""Other libraries name the argument for the group differently."""

import horovod.torch as hvd
import lightning as L
import torch.distributed as dist
import torch.distributed.nn
import torch_xla.core.xla_model as xm


def f(x, rank, few, everybody):
    if rank < 4:
        torch.distributed.nn.all_gather(x, few)
        hvd.allreduce(x, process_set=everybody)
        xm.all_reduce("sum", [x], groups=[[0, 1, 2, 3]])


class Model(L.LightningModule):
    def training_step(self, batch, i):
        if self.global_rank < 2:
            self.log("x", 1.0, sync_dist=True, sync_dist_group=self.first)
