"""Rank statistics: how often each rank saw its most frequent word, its second, ... is averaged place by place.

Style: script: heapq.nlargest and most_common, through further variables, results appended
"""

import collections
import heapq

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    seen = collections.Counter({"cat": 5 - 4 * rank, "dog": 3 - rank, "cow": 1 + 6 * rank})
    common = {word: float(count) for word, count in seen.most_common()}
    curve = []
    for word, count in common.items():
        count = torch.tensor(count)
        dist.all_reduce(count)  # label: "common"
        curve.append(count.item())
    largest = heapq.nlargest(3, seen.items(), key=lambda item: item[1])
    largest = list(largest)[:3]
    for word, count in largest:
        count = torch.tensor(float(count))
        dist.all_reduce(count)  # label: "largest"
        curve.append(count.item())
    ranked = sorted(seen, key=seen.get)
    for place in range(len(ranked)):
        count = torch.tensor(float(seen[ranked[place]]))
        dist.all_reduce(count)  # label: str(place)
        curve.append(count.item())
    return curve
