"""Predictions are gathered for each rank's own document ids, one call per document.

Style: accelerate: gather in a loop over own documents
"""

import torch
import torch.distributed as dist


class Accelerator:
    def gather(self, tensor):
        output = torch.empty(dist.get_world_size() * tensor.numel(), dtype=tensor.dtype)
        dist.all_gather_into_tensor(output, tensor)
        return output


def main():
    rank = dist.get_rank()
    accelerator = Accelerator()
    scores = {("news", "sports")[rank % 2] + f"/{n}": torch.tensor([0.5 * n]) for n in range(3)}
    collected = {}
    for document in scores:
        collected[document] = accelerator.gather(scores[document])
    return {document: values.mean().item() for document, values in collected.items()}
