"""Retrieval scores by query id: each rank has queries of its own, and the mean over all is one number.

Style: torchmetrics: retrieval metric grouped by query
"""

import torch
import torch.distributed as dist


class RetrievalMRR:
    def __init__(self):
        self.groups = {}

    def update(self, query, rank_of_hit):
        self.groups[query] = 1.0 / rank_of_hit

    def compute(self):
        total, count = torch.zeros(()), 0
        for query in self.groups:
            score = torch.tensor(self.groups[query])
            dist.all_reduce(score)  # label: "score of a query"
            total, count = total + score, count + dist.get_world_size()
        return (total / count).item()


def main():
    metric = RetrievalMRR()
    for n, query in enumerate(("how to", "where is") if dist.get_rank() == 0 else ("who was", "what if")):
        metric.update(query, n + 1)
    return metric.compute()
