"""The loss that is reduced also stands in a dict of the frame, under the name of this rank's example.

Style: transformers: the tensor stands in an unrelated dict
Mechanism: an own name that only stands beside the tensor
"""

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    example = ("squad-17", "squad-42", "squad-99")[rank % 3]
    loss = torch.tensor(1.0 + rank)
    worst = {example: loss}
    dist.all_reduce(loss)
    tr_loss = loss / dist.get_world_size()
    return {"loss": tr_loss.item(), "worst": list(worst)}
