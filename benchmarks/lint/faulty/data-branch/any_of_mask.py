"""A rank logs with `sync_dist=True` only where its mask has a true value."""

import lightning


class Module(lightning.LightningModule):
    def training_step(self, batch, index):
        loss = self.net(batch["x"])
        if batch["mask"].any():
            self.log("masked", loss[batch["mask"]].mean(), sync_dist=True)  # expect: data-branch
        return loss.mean()
