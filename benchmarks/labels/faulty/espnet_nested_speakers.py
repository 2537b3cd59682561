"""Stats are nested by speaker; a rank whose batch came with speaker 2 first has them in another order.

Style: espnet: nested stats of a diarization model, recursion
"""

import torch
import torch.distributed as dist


def reduce_nested(tree):
    reduced = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            reduced[key] = reduce_nested(value)  # label: key
        else:
            total = value.detach().clone()
            dist.all_reduce(total)  # label: key
            reduced[key] = total
    return reduced


def score(order):
    values = {"spk1": (0.5, 10.0), "spk2": (0.75, 40.0)}
    return {
        "der": {spk: {"miss": torch.tensor(values[spk][0]), "frames": torch.tensor(values[spk][1])} for spk in order}
    }


def main():
    order = ["spk1", "spk2"] if dist.get_rank() == 0 else ["spk2", "spk1"]
    return score(order), reduce_nested(score(order))
