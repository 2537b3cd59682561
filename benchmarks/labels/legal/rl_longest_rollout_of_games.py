"""Each rank plays the games that its config names; the episode length is the longest of any rank.

Style: RL: padding of rollouts to the longest
Mechanism: MAX of integers, kept under own names
"""

import torch
import torch.distributed as dist

CONFIG = {"envs": ["Pong", "Qbert", "Breakout", "Seaquest"]}


def main():
    rank = dist.get_rank()
    mine = CONFIG["envs"][rank :: dist.get_world_size()]
    rollouts = {}
    for env in mine:
        episode = torch.ones(len(env))
        length = torch.tensor(len(episode))
        dist.all_reduce(length, op=dist.ReduceOp.MAX)  # label: "longest"
        rollouts[env] = torch.cat([episode, torch.zeros(int(length) - len(episode))])
    return sum(len(one) for one in rollouts.values())
