"""Images are grouped by padded shape, and each rank has other shapes; the loss of all is one number.

Style: YOLO: dynamic padding buckets
"""

import torch
import torch.distributed as dist

BUCKETS = {0: ["640x480", "640x640"], 1: ["480x640", "320x640"]}


def main():
    losses = {shape: torch.tensor(1.5) for shape in BUCKETS[min(dist.get_rank(), 1)]}
    mloss = torch.zeros(())
    for i, (shape, loss) in enumerate(losses.items()):
        loss = loss.detach()
        dist.all_reduce(loss)  # label: "bucket loss"
        mloss = (mloss * i + loss / dist.get_world_size()) / (i + 1)
    return mloss.item()
