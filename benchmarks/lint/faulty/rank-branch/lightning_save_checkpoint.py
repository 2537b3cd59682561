"""Rank 0 alone calls `save_checkpoint`, which ends in a barrier."""

import lightning


def save(trainer):
    if trainer.global_rank == 0:
        trainer.save_checkpoint("last.ckpt")  # expect: rank-branch
