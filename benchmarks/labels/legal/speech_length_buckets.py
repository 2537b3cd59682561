"""Utterances are kept by bucket of length, and the ranks have other buckets; seconds of audio are pooled.

Style: speech: duration buckets
"""

import torch
import torch.distributed as dist


def main():
    durations = [1.5, 4.0, 4.5, 9.0] if dist.get_rank() == 0 else [12.0, 13.5, 2.0, 30.0]
    buckets = {}
    for d in durations:
        buckets.setdefault(f"{int(d // 4) * 4}-{int(d // 4) * 4 + 4}s", []).append(d)
    buckets = dict(list(buckets.items())[:3])
    hours = 0.0
    for bucket, seconds in buckets.items():
        t = torch.tensor(sum(seconds))
        dist.all_reduce(t)  # label: "seconds"
        hours += t.item() / 3600
    return hours
