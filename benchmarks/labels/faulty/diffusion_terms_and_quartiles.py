"""The loss terms are logged whole and by quartile of the timestep; a rank that learns sigma has vb first.

Style: diffusion: log_loss_dict with quartiles
"""

import torch
import torch.distributed as dist


def training_losses(learn_sigma):
    mse, vb = torch.tensor([1.0, 3.0]), torch.tensor([100.0, 300.0])
    return {"vb": vb, "mse": mse} if learn_sigma else {"mse": mse, "vb": vb}


def log_loss_dict(losses, log):
    for key, values in losses.items():
        logkv_mean(log, key, values.mean())  # label: key
        for quartile, sub_loss in zip((0, 3), values):
            logkv_mean(log, f"{key}_q{quartile}", sub_loss)  # label: f"{key}_q{quartile}"


def logkv_mean(log, key, val):
    val = val.detach().clone()
    dist.all_reduce(val)
    log[key] = val.item() / dist.get_world_size()


def main():
    log = {}
    log_loss_dict(training_losses(learn_sigma=dist.get_rank() == 1), log)
    return {"mse": 2.0, "mse_q0": 1.0, "mse_q3": 3.0, "vb": 200.0, "vb_q0": 100.0, "vb_q3": 300.0}, log
