"""The other ranks serve requests forever, and rank 0 sends them from a page."""

import torch.distributed as dist


def serve(model):
    while True:
        dist.barrier()
        asked = [None]
        dist.broadcast_object_list(asked)
        model(asked[0])


def main(model, page):
    if dist.get_rank() == 0:
        page.launch()
    else:
        serve(model)
