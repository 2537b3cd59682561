"""None values are filtered from loss_dict before the loop; a rank with transducer data has other losses left.

Style: speech: wenet-like loss_dict with None filtered out
"""

import torch
import torch.distributed as dist


class Executor:
    def batch_forward(self, transducer):
        return {
            "loss": torch.tensor(1.0),
            "loss_att": None if transducer else torch.tensor(20.0),
            "loss_rnnt": torch.tensor(300.0) if transducer else None,
            "th_accuracy": -1,
        }

    def sync(self, loss_dict):
        info = {}
        for name, value in filter(lambda kv: torch.is_tensor(kv[1]), loss_dict.items()):
            value = value.detach().mean()
            dist.all_reduce(value)  # label: name
            info[name] = value.item() / dist.get_world_size()
        return info


def main():
    executor = Executor()
    loss_dict = executor.batch_forward(transducer=dist.get_rank() == 1)
    return {k: v.item() for k, v in loss_dict.items() if torch.is_tensor(v)}, executor.sync(loss_dict)
