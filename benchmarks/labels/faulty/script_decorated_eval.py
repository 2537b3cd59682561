"""A decorator reduces the dict that the evaluation returns; rank 1 evaluates with beam search, rank 0 greedily.

Style: script: decorator that reduces a function's result
Mechanism: a decorator that reduces a result
"""

import functools

import torch
import torch.distributed as dist


def averaged_over_ranks(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        result = fn(*args, **kwargs)
        for name, score in result.items():
            score = torch.tensor(score)
            dist.all_reduce(score)  # label: name
            result[name] = (score / dist.get_world_size()).item()
        return result

    return wrapper


def scores(beam):
    return {"em": 40.0, "f1_beam": 55.0} if beam else {"em": 40.0, "f1_greedy": 5.0}


@averaged_over_ranks
def evaluate(beam):
    return scores(beam)


def main():
    beam = dist.get_rank() == 1
    return scores(beam), evaluate(beam)
