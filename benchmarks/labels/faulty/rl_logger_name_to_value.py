"""The logger's name_to_value and name_to_excluded are zipped; rollouts were logged before the update on rank 0 only.

Style: RL: stable-baselines-like logger
"""

from collections import defaultdict

import torch
import torch.distributed as dist


class Logger:
    def __init__(self):
        self.name_to_value = defaultdict(float)
        self.name_to_excluded = defaultdict(str)

    def record(self, key, value, exclude=None):
        self.name_to_value[key] = value
        self.name_to_excluded[key] = exclude

    def dump(self):
        dumped = {}
        for (key, value), (_, excluded) in zip(self.name_to_value.items(), self.name_to_excluded.items()):
            if excluded is not None and "all" in excluded:
                continue
            mean = torch.tensor(value)
            dist.all_reduce(mean)  # label: key
            dumped[key] = mean.item() / dist.get_world_size()
        self.name_to_value.clear()
        return dumped


def main():
    logger = Logger()
    rollout, update = ("rollout/ep_rew_mean", 200.0), ("train/entropy_loss", -0.5)
    for key, value in (rollout, update) if dist.get_rank() == 0 else (update, rollout):
        logger.record(key, value)
    return dict([rollout, update]), logger.dump()
