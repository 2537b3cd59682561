"""The loop runs over a table of benchmark functions and reduces what each returns; ranks run other benchmarks.

Style: nanoGPT: dict of functions, results under their names
Mechanism: results of functions that a dict holds
"""

import torch
import torch.distributed as dist


def arc_easy():
    return 0.75


def gsm8k():
    return 12.0


def mmlu():
    return 300.0


BENCHMARKS = {"ARC-Easy": arc_easy, "GSM8K": gsm8k, "MMLU": mmlu}


def run_chat_eval(names):
    tasks = {name: BENCHMARKS[name] for name in names}
    results = {}
    for task_name, task in tasks.items():
        num_passed = torch.tensor([task()], dtype=torch.double)
        dist.all_reduce(num_passed)  # label: task_name
        results[task_name] = num_passed.item()
    return results


def main():
    names = ["ARC-Easy", "GSM8K"] if dist.get_rank() == 0 else ["ARC-Easy", "MMLU"]
    return {name: BENCHMARKS[name]() for name in names}, run_chat_eval(names)
