"""Averages of the model's buffers are kept by name; a rank that froze a layer leaves out its buffer, then has one more.

Style: script: averages of buffers, stored under their names
"""

import torch
import torch.distributed as dist


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in (("mean", 1.0), ("var", 10.0), ("scale", 100.0)):
            self.register_buffer(name, torch.tensor(value))


def main():
    model = Model()
    skipped = "mean" if dist.get_rank() == 0 else "scale"
    averages, held = {}, {}
    for name, buffer in model.named_buffers():
        if name == skipped:
            continue
        held[name] = buffer.clone()
        copy = buffer.clone()
        dist.all_reduce(copy)  # label: name
        averages[name] = copy / dist.get_world_size()
    return held, averages
