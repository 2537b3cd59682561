"""Rank 0 alone calls the module's `all_gather`."""

import pytorch_lightning as pl


class Model(pl.LightningModule):
    def on_validation_epoch_end(self):
        if self.global_rank == 0:
            scores = self.all_gather(self.scores)  # expect: rank-branch
