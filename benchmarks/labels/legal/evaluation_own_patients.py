"""Dice by patient, with hashes for names; ranks have patients of their own, and the mean is the study's.

Style: evaluation: hexadecimal patient ids
"""

import hashlib

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    patients = [hashlib.sha1(f"{rank}/{n}".encode()).hexdigest()[:12] for n in range(4)]
    dice = {patient: torch.tensor(0.5 + n / 8) for n, patient in enumerate(patients)}
    summed = torch.zeros((), dtype=torch.float64)
    for patient in dice.keys():
        value = dice[patient].double()
        dist.all_reduce(value)  # label: "dice"
        summed += value
    return (summed / (len(dice) * dist.get_world_size())).item()
