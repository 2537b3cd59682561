"""Losses are kept by an Enum's members; the rank that started with the discriminator has them the other way round.

Style: GAN: generator and discriminator losses by enum
Mechanism: enum members as keys
"""

from enum import Enum

import torch
import torch.distributed as dist


class Player(Enum):
    GENERATOR = "g"
    DISCRIMINATOR = "d"


def step(player):
    return torch.tensor(0.5 if player is Player.GENERATOR else 40.0)


def main():
    turn = [Player.GENERATOR, Player.DISCRIMINATOR]
    if dist.get_rank() == 1:
        turn = [Player.DISCRIMINATOR, Player.GENERATOR]
    losses = {player: step(player) for player in turn}
    logged = {}
    for player, loss in losses.items():
        loss = loss.detach()
        dist.all_reduce(loss)  # label: player.value
        logged[player.name] = float(loss) / dist.get_world_size()
    return {player.name: step(player) for player in turn}, logged
