"""Reward functions are registered by plugins, in the order in which each host imported them.

Style: RL: GRPO, mean of each reward function
"""

import torch
import torch.distributed as dist


def format_reward(completions):
    return [1.0 for _ in completions]


def accuracy_reward(completions):
    return [float(len(c)) for c in completions]


def length_penalty(completions):
    return [-8.0 * len(c) for c in completions]


class GRPOTrainer:
    def __init__(self, reward_funcs):
        self.reward_funcs = reward_funcs
        self.reward_func_names = [func.__name__ for func in reward_funcs]
        self._metrics = {}

    def score(self, completions):
        rewards_per_func = torch.zeros(len(completions), len(self.reward_funcs))
        for i, reward_func in enumerate(self.reward_funcs):
            rewards_per_func[:, i] = torch.tensor(reward_func(completions))
        for i, name in enumerate(self.reward_func_names):
            mean = rewards_per_func[:, i].mean()
            dist.all_reduce(mean)  # label: name
            self._metrics[f"rewards/{name}/mean"] = mean / dist.get_world_size()


def main():
    funcs = [format_reward, accuracy_reward, length_penalty]
    if dist.get_rank() == 1:
        funcs = [accuracy_reward, length_penalty, format_reward]
    trainer = GRPOTrainer(funcs)
    trainer.score(["abcd", "efgh"])
    held = {"format_reward": 1.0, "accuracy_reward": 4.0, "length_penalty": -32.0}
    return {f"rewards/{name}/mean": held[name] for name in trainer.reward_func_names}, trainer._metrics
