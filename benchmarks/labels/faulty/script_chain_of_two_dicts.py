"""Training and validation stats are chained; rank 1 chains them the other way round.

Style: script: itertools.chain of items
Mechanism: itertools.chain of two dicts
"""

import itertools

import torch
import torch.distributed as dist


def main():
    train, valid = {"train_loss": torch.tensor(1.0)}, {"valid_loss": torch.tensor(7.0)}
    parts = (train, valid) if dist.get_rank() == 0 else (valid, train)
    board = {}
    for name, value in itertools.chain(*(part.items() for part in parts)):
        value = value.clone()
        dist.all_reduce(value)
        board[name] = value
    return train | valid, board
