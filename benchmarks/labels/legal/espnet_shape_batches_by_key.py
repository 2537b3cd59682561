"""Each rank reads its own part of the shape file and adds up how many frames and utterances there are.

Style: espnet: statistics collection over own keys
"""

import torch
import torch.distributed as dist


def read_shapes(rank):
    lines = [f"lecture{rank}_{n:02d} {100 * (n + 1)},80" for n in range(4)]
    return dict(line.split() for line in lines)


def main():
    frames = torch.zeros(())
    for key, shape in read_shapes(dist.get_rank()).items():
        length = torch.tensor(float(shape.split(",")[0]))
        dist.all_reduce(length)  # label: "length of an utterance"
        frames += length
    return float(frames)
