"""Rank 0 alone logs with `sync_dist=True`, which reduces."""

import lightning as L


class Model(L.LightningModule):
    def validation_step(self, batch, index):
        loss = self(batch)
        if self.trainer.is_global_zero:
            self.log("val", loss, sync_dist=True)  # expect: rank-branch
