"""Events are tuples (name, value, step), reduced as they are unpacked, and rank 1 skipped the loss scale.

Style: Megatron: DeepSpeed's monitor.write_events of tuples
Mechanism: a list of tuples that are unpacked
"""

import torch
import torch.distributed as dist


class Engine:
    def __init__(self, fp16):
        self.global_samples = 64
        self.summary_events = [("Train/Samples/train_loss", 2.0, self.global_samples)]
        if fp16:
            self.summary_events += [("Train/Samples/loss_scale", 65536.0, self.global_samples)]
        self.summary_events += [("Train/Samples/lr", 0.125, self.global_samples)]
        if not fp16:
            self.summary_events += [("Train/Samples/elapsed_time", 9.0, self.global_samples)]

    def write_events(self):
        written = {}
        for tag, value, step in self.summary_events:
            value = torch.tensor(value)
            dist.all_reduce(value)  # label: tag
            written[tag] = value.item() / dist.get_world_size()
        return written


def main():
    engine = Engine(fp16=dist.get_rank() == 0)
    return {tag: value for tag, value, _ in engine.summary_events}, engine.write_events()
