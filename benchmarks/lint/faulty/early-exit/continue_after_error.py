"""A rank that cannot read a file goes on to the next one without the reduction."""

import torch.distributed as dist


def evaluate(files, total):
    for file in files:
        try:
            score = wer(read(file))
        except Exception as error:
            print(error)
            continue  # expect: early-exit
        total += score
        dist.all_reduce(total)
