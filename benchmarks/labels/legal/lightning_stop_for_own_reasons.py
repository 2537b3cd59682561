"""Each rank has a reason of its own to stop; one flag over all ranks is what decides.

Style: Lightning: flags with other names, any of them stops
"""

import torch
import torch.distributed as dist


class Callback:
    def __init__(self, reason, happened):
        self.flags = {reason: torch.tensor(float(happened))}

    def should_stop(self):
        stop = False
        for reason, flag in self.flags.items():
            flag = flag.clone()
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)  # label: "stop"
            stop = stop or bool(flag)
        return stop


def main():
    callback = Callback("loss_is_nan", False) if dist.get_rank() == 0 else Callback("out_of_disk", True)
    return callback.should_stop()
