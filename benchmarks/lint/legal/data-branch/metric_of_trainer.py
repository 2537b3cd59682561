"""The metric of the trainer has been reduced already."""

import torch.distributed as dist


def on_validation_end(trainer, best):
    metrics = trainer.callback_metrics
    if metrics["val_loss"].item() < best:
        dist.barrier()
