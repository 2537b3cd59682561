"""Sentences are grouped by language as they come (itertools.groupby), and each group's score is reduced.

Style: evaluation: itertools.groupby
Mechanism: itertools.groupby
"""

import itertools

import torch
import torch.distributed as dist

HYPS = [("de", 30.0), ("de", 34.0), ("zh", 2.0), ("zh", 4.0)]


def main():
    hyps = HYPS if dist.get_rank() == 0 else HYPS[2:] + HYPS[:2]
    bleu = {}
    for lang, group in itertools.groupby(hyps, key=lambda pair: pair[0]):
        scores = [score for _, score in group]
        mean = torch.tensor(scores).mean()
        dist.all_reduce(mean)  # label: lang
        bleu[lang] = mean.item() / dist.get_world_size()
    return {"de": 32.0, "zh": 3.0}, bleu
