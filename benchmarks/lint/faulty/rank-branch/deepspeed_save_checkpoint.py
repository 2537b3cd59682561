"""Rank 0 alone saves the checkpoint of a DeepSpeed engine, which all ranks have to save."""

import deepspeed
import torch.distributed as dist


def train(args, model, batches):
    engine, _, _, _ = deepspeed.initialize(args=args, model=model)
    for batch in batches:
        engine.backward(engine(batch))
        engine.step()
    if dist.get_rank() == 0:
        engine.save_checkpoint(args.out)  # expect: rank-branch
