"""No loop: scalars are averaged and written line by line, and a rank without KL stopping goes through other lines.

Style: RL: cleanrl-like writer.add_scalar calls in branches
Mechanism: look-ups line by line, without a loop
"""

import torch
import torch.distributed as dist


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars[tag] = float(value)


def avg(x):
    t = torch.tensor(x)
    dist.all_reduce(t)
    return t / dist.get_world_size()


def main():
    writer = Writer()
    v_loss, pg_loss, entropy = 0.5, -3.0, 40.0
    writer.add_scalar("losses/value_loss", avg(v_loss), 1)  # label: "losses/value_loss"
    if dist.get_rank() == 0:
        writer.add_scalar("losses/policy_loss", avg(pg_loss), 1)  # label: "losses/policy_loss"
        writer.add_scalar("losses/entropy", avg(entropy), 1)  # label: "losses/entropy"
    else:
        writer.add_scalar("losses/entropy", avg(entropy), 1)  # label: "losses/entropy"
        writer.add_scalar("losses/policy_loss", avg(pg_loss), 1)  # label: "losses/policy_loss"
    return {"losses/value_loss": v_loss, "losses/policy_loss": pg_loss, "losses/entropy": entropy}, writer.scalars
