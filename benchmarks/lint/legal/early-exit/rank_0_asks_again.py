"""Rank 0 asks again until it has an answer, while the others wait in the broadcast."""

import torch.distributed as dist


def talk(generate):
    said = [None]
    while True:
        if dist.get_rank() == 0:
            said = [input("> ").strip()]
            if not said[0]:
                continue
        dist.broadcast_object_list(said, src=0)
        generate(said[0])
