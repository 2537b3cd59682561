"""A tree of stats is flattened to tuple paths, as dm_tree does, and each path's value is reduced.

Style: RL: flatten_with_path over nested stats
"""

import torch
import torch.distributed as dist


def flatten_with_path(tree, path=()):
    if isinstance(tree, dict):
        for k, v in tree.items():
            yield from flatten_with_path(v, path + (k,))
    else:
        yield path, tree


def learner_stats(policies):
    return {"learner": {p: {"vf_loss": torch.tensor(1.0 + 100 * ord(p[0]))} for p in policies}}


def main():
    policies = ["attacker", "defender"] if dist.get_rank() == 0 else ["defender", "attacker"]
    stats = learner_stats(policies)
    merged = {}
    for path, value in flatten_with_path(stats):
        value = value + 0.0
        dist.all_reduce(value)  # label: "/".join(path)
        merged["/" + "/".join(path)] = value
    return {"/" + "/".join(path): value for path, value in flatten_with_path(stats)}, merged
