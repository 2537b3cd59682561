"""Stats are weighted and summed in the loop of the trainer itself; a task without CER gives WER in its place.

Style: espnet: weighted sum inline, new tensors by type()
"""

import torch
import torch.distributed as dist


class Trainer:
    @classmethod
    def train_one_epoch(cls, model):
        stats, weight = model()
        weight = weight.sum()
        averaged = dict()
        for k, v in stats.items():
            if v is None:
                continue
            v = (v * weight.type(v.dtype)).sum()
            dist.all_reduce(v)  # label: k
            averaged[k] = v
        dist.all_reduce(weight)
        return {k: v / weight for k, v in averaged.items()}


def model():
    stats = {"loss": torch.tensor(2.0), "cer": None, "wer": None}
    if dist.get_rank() == 0:
        stats["cer"] = torch.tensor(0.0625)
    else:
        stats["wer"] = torch.tensor(50.0)
    return stats, torch.ones(1)


def main():
    held = {k: v for k, v in model()[0].items() if v is not None}
    return held, Trainer.train_one_epoch(model)
