"""Keys come from the first finished episode of each rank, which had them in another order.

Style: RL: legged_gym's ep_infos
"""

import torch
import torch.distributed as dist


def main():
    infos = [{"rew_torque": 1.0, "rew_height": 50.0}, {"rew_torque": 3.0, "rew_height": 52.0}]
    if dist.get_rank() == 1:
        infos = [{"rew_height": 40.0, "rew_torque": 2.0}, {"rew_height": 42.0, "rew_torque": 4.0}]
    logs = {}
    for key in infos[0]:
        mean = torch.tensor([info[key] for info in infos]).mean()
        dist.all_reduce(mean)
        logs["Episode/" + key] = mean.item() / dist.get_world_size()
    held = {"Episode/" + key: sum(info[key] for info in infos) / 2 for key in infos[0]}
    return held, logs
