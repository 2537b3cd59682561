"""Another function checks results of the same name, but not these."""

import torch.distributed as dist


def mean_of(results, count):
    if len(results) != count:
        raise ValueError("not all results are there")
    return sum(results) / count


def evaluate(model, loader):
    results = []
    for batch in loader:
        try:
            score = model(batch)
            dist.all_reduce(score)  # expect: swallowed-error
            results.append(score)
        except Exception:
            results = None
            break
    return results
