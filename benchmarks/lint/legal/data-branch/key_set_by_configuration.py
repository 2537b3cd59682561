"""Whether the key is there depends on the hyperparameters alone."""

import lightning as L


class Model(L.LightningModule):
    def training_step(self, batch, i):
        metrics = {"loss": self.net(batch)}
        if self.hparams.acc:
            metrics["acc"] = acc(batch)
        if "acc" in metrics:
            self.log("acc", metrics["acc"], sync_dist=True)
