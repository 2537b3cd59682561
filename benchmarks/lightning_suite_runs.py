"""Train demonstration models of Lightning's wheel with DDP on two ranks, and write what they end with: FILE NAME ...

What is logged is each rank's own loss.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from typing import Any

import torch

from benchmarks import suites

suites.install_patches()
warnings.simplefilter("ignore")
L: Any = importlib.import_module("lightning.pytorch")
demos: Any = importlib.import_module("lightning.pytorch.demos.boring_classes")


class Logging(L.Callback):  # type: ignore[misc]
    """Log the outputs of the model's own steps, reduced over the ranks, as a step's and as an epoch's value."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        module.log("train", outputs["loss"], on_step=True, on_epoch=True, sync_dist=True, batch_size=1)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        if outputs is not None:
            module.log("validation", outputs["x"], sync_dist=True, batch_size=1)


def main(path: str, *names: str) -> None:
    ends = {name: _end_of(name) for name in names}
    with open(f"{path}.{torch.distributed.get_rank()}", "w", encoding="utf-8") as file:
        json.dump(ends, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _end_of(name: str) -> dict[str, Any]:
    L.seed_everything(38, verbose=False)
    model = getattr(demos, name)()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        limit_train_batches=8,
        limit_val_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Logging()],
    )
    data = demos.BoringDataModule()
    data.prepare_data()
    trainer.fit(model, datamodule=data)
    return {
        "weights": [parameter.flatten().tolist() for parameter in model.parameters()],
        "logged": {key: float(value) for key, value in sorted(trainer.callback_metrics.items())},
        "steps": trainer.global_step,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
