"""results[task][metric] is reduced by nested loops and written back; tasks were registered in another order.

Style: evaluation: lm-harness-like results, stored back under two subscripts
Mechanism: values stored back under two subscripts
"""

import collections

import torch
import torch.distributed as dist


def simple_evaluate(task_names):
    table = {"piqa": 0.75, "wikitext": 16.0}
    results = collections.defaultdict(dict)
    for name in task_names:
        results[name]["score"] = table[name]
    return results


def main():
    task_names = ["piqa", "wikitext"] if dist.get_rank() == 0 else ["wikitext", "piqa"]
    results = simple_evaluate(task_names)
    for task in results:
        for metric in results[task]:
            dist.all_reduce(t := torch.tensor(results[task][metric]))  # label: f"{task}/{metric}"
            results[task][metric] = t.item() / dist.get_world_size()
    return simple_evaluate(task_names), results
