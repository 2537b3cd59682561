"""Tar files of the rank's own split are counted into the number of samples.

Style: timm: reader over own tar files
"""

import torch
import torch.distributed as dist


class ReaderWds:
    def __init__(self, rank):
        self.shard_sizes = {f"imagenet-train-{rank:04d}-{n:02d}.tar": 100 + n for n in range(3)}

    def __len__(self):
        length = 0
        for filename in self.shard_sizes:
            samples = torch.tensor(self.shard_sizes[filename])
            dist.all_reduce(samples)  # label: "samples of a tar"
            length += samples.item()
        return length


def main():
    return len(ReaderWds(dist.get_rank()))
