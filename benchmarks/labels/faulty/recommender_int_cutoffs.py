"""Recall is kept by the cut-off, an int, and the cut-offs come from a configuration that is sorted on one rank only.

Style: recommender: int keys
"""

import torch
import torch.distributed as dist


class Recall:
    def __init__(self, cutoffs):
        self.at = {k: torch.tensor(float(k)) for k in cutoffs}

    def sync(self):
        for k in self.at:
            dist.all_reduce(self.at[k])  # label: f"recall@{k}"
        return {f"recall@{k}": value.item() for k, value in self.at.items()}


def main():
    cutoffs = [20, 5, 100] if dist.get_rank() == 0 else [5, 20, 100]
    return {f"recall@{k}": float(k) for k in cutoffs}, Recall(cutoffs).sync()
