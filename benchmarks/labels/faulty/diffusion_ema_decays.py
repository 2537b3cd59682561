"""Validation losses of several EMA models are keyed by their decay, a float.

Style: diffusion: float keys
Mechanism: float keys
"""

import torch
import torch.distributed as dist


def evaluate(decays):
    return {decay: torch.tensor(1000 * (1 - decay)) for decay in decays}


def main():
    decays = (0.5, 0.99, 0.9) if dist.get_rank() == 0 else (0.9, 0.99, 0.5)
    losses = evaluate(decays)
    for decay, loss in list(losses.items()):
        loss = loss.clone()
        dist.all_reduce(loss)  # label: f"ema {decay}"
        losses[decay] = loss / dist.get_world_size()
    return evaluate(decays), losses
