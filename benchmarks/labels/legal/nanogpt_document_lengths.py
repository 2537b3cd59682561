"""A histogram over all documents, filled from each rank's own documents by title.

Style: nanoGPT: own documents into a histogram
"""

import torch
import torch.distributed as dist

DOCS = {0: {"Alan Turing": 900, "Bletchley Park": 300}, 1: {"Zuse Z3": 100, "ENIAC": 500}}


def main():
    bins = torch.zeros(4)
    for title, length in DOCS[min(dist.get_rank(), 1)].items():
        one_hot = torch.zeros(4)
        one_hot[min(length // 250, 3)] = 1
        dist.all_reduce(one_hot)  # label: "document"
        bins += one_hot
    return bins.tolist()
