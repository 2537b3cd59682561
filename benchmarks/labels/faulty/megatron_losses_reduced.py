"""The loss function returns lm loss and, on the ranks with the MTP head, mtp loss in place of the z loss.

Style: Megatron: loss_func returns a dict, averaged over the data-parallel group
"""

import torch
import torch.distributed as dist


def average_losses_across_data_parallel_group(losses):
    averaged_losses = torch.cat([loss.clone().detach().view(1) for loss in losses])
    dist.all_reduce(averaged_losses)
    return averaged_losses / dist.get_world_size()


def loss_func(with_mtp):
    loss_dict = {"lm loss": torch.tensor(5.0)}
    if with_mtp:
        loss_dict["mtp_1 loss"] = torch.tensor(7.0)
    else:
        loss_dict["z loss"] = torch.tensor(0.125)
    return loss_dict


def train_step(with_mtp):
    loss_dict = loss_func(with_mtp)
    losses_reduced = {}
    for key in loss_dict:
        losses_reduced[key] = average_losses_across_data_parallel_group([loss_dict[key]])[0]  # label: key
    return losses_reduced


def main():
    with_mtp = dist.get_rank() == 1
    return loss_func(with_mtp), train_step(with_mtp)
