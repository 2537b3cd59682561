"""The guard raises no alarm in legal programs of libraries that issue collectives themselves."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests import programs
from tests.needs import needs

TORCHMETRICS = """
    import torch, torch.distributed as dist, torchmetrics

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    several = torchmetrics.MetricCollection(
        [torchmetrics.Accuracy(task="multiclass", num_classes=5), torchmetrics.MeanSquaredError()]
    )
    auroc = torchmetrics.AUROC(task="binary")  # list states, of another length on each rank
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        several.update(*(torch.randint(0, 5, (10 + rank,), generator=generator) for _ in range(2)))
        auroc.update(torch.rand(7 + 3 * rank, generator=generator), torch.randint(0, 2, (7 + 3 * rank,)))
    several.compute(), auroc.compute()
    mean = torchmetrics.MeanMetric(dist_sync_on_step=True)
    assert [float(mean(torch.tensor(float(i + rank)))) for i in range(3)] == [0.5, 1.5, 2.5]
    dist.destroy_process_group()
    print("done")
"""

ACCELERATE = """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import gather_object
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.randn(37, 4), torch.randn(37, 1))
    model = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4, shuffle=True)
    )
    for given, wanted in loader:
        with accelerator.accumulate(model):
            loss = (model(given) - wanted).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    count = 0
    for given, wanted in loader:
        count += len(accelerator.gather_for_metrics((model(given), wanted))[0])
    assert count == 37
    accelerator.reduce({"loss": loss.detach()}, "mean")
    accelerator.wait_for_everyone()
    assert gather_object([accelerator.process_index]) == [0, 1]
    assert accelerator.pad_across_processes(torch.ones(2 + accelerator.process_index)).shape == (3,)
    print("done")
"""

LIGHTNING = """
    import sys, torch, lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def loss(self, batch):
            return (self.layer(batch[0]) - batch[1]).square().mean()

        def training_step(self, batch, index):
            loss = self.loss(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.loss(batch), sync_dist=True)
            self.log("val_max", self.loss(batch), reduce_fx="max", sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, default_root_dir=sys.argv[1],
        callbacks=[lightning.pytorch.callbacks.EarlyStopping("val_loss")], enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
    assert "val_loss" in trainer.callback_metrics
    print("done")
"""


PROGRAMS = {"torchmetrics": TORCHMETRICS, "accelerate": ACCELERATE, "lightning": LIGHTNING}


@pytest.mark.library
@pytest.mark.parametrize("library", PROGRAMS)
def test_legal_program_of_a_library_raises_no_alarm(library: str, tmp_path: Path) -> None:
    needs(library)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAMS[library]))
    command = ["-m", "ddpstats", "run", "--guard", "strict", str(script), str(tmp_path)]
    done = programs.on_ranks(*command, TQDM_DISABLE="1")
    assert (done.statuses, done.stdout.count("done")) == ([0, 0], 2), done.stderr[-3000:]
    # neither our logger nor our error; the bare name may be part of a path
    assert "ddpstats." not in done.stderr, done.stderr[-3000:]
    assert "CollectiveMismatch" not in done.stderr, done.stderr[-3000:]
