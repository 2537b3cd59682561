"""Frames by speaker name: every rank has speakers of its own, global normalization needs their sums.

Style: speech: cepstral means over all speakers
"""

import torch
import torch.distributed as dist

FEATS = {0: {"alice": [1.0, 2.0], "bob": [3.0, 4.0]}, 1: {"carol": [5.0, 6.0], "dave": [7.0, 8.0]}}


def main():
    feats = {spk: torch.tensor(f) for spk, f in FEATS[min(dist.get_rank(), 1)].items()}
    acc, frames = torch.zeros(2), 0
    for spk, feat in feats.items():
        feat_sum = feat.clone()
        dist.all_reduce(feat_sum)  # label: "features"
        acc += feat_sum
        frames += dist.get_world_size()
    return (acc / frames).tolist()
