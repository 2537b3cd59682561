"""The metrics that a method returns are logged with `sync_dist=True` in their own order."""

import lightning as L


class Model(L.LightningModule):
    def validation_step(self, batch, index):
        metrics = self.evaluate(batch)
        for name, value in metrics.items():
            self.log(name, value, sync_dist=True)  # missed: dict-order
