"""The tracker gets a name when a layer first saves it; the first MoE layer of rank 1 saves the z loss first.

Style: MoE: tracker of auxiliary losses by name and layer
"""

import torch
import torch.distributed as dist

_TRACKER = {}


def save_to_aux_losses_tracker(name, loss, layer_number, num_layers):
    if name not in _TRACKER:
        _TRACKER[name] = {"values": torch.zeros(num_layers)}
    _TRACKER[name]["values"][layer_number] += loss.detach()


def reduce_aux_losses_tracker_across_ranks(track_names=None):
    if track_names is None:
        track_names = _TRACKER.keys()
    for name in track_names:
        values = _TRACKER[name]["values"]
        dist.all_reduce(values)  # label: name


def main():
    _TRACKER.clear()
    losses = [("load_balancing_loss", 1.0), ("z_loss", 256.0)]
    if dist.get_rank() == 1:
        losses.reverse()
    for layer in range(2):
        for name, value in losses:
            save_to_aux_losses_tracker(name, torch.tensor(value), layer, 2)
    reduce_aux_losses_tracker_across_ranks()
    return {name: 2 * value for name, value in losses}, {k: v["values"].sum() for k, v in _TRACKER.items()}
