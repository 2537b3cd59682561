"""Results of several evaluators are nested dicts, which ranks built from evaluators in different order.

Style: detectron2: DatasetEvaluators with nested results
Mechanism: nested loops over nested dicts of floats
"""

import torch
import torch.distributed as dist


class COCOEvaluator:
    def evaluate(self):
        return {"bbox": {"AP": 40.0, "AP50": 60.0}}


class SemSegEvaluator:
    def evaluate(self):
        return {"sem_seg": {"mIoU": 3.0, "fwIoU": 4.0}}


def evaluate(evaluators):
    results = {}
    for evaluator in evaluators:
        results.update(evaluator.evaluate())
    return results


def mean_over_ranks(results):
    flat = {}
    for task, res in results.items():
        for metric, value in res.items():
            value = torch.tensor(value)
            dist.all_reduce(value)  # label: f"{task}/{metric}"
            flat[f"{task}/{metric}"] = value / dist.get_world_size()
    return flat


def main():
    evaluators = [COCOEvaluator(), SemSegEvaluator()]
    if dist.get_rank() == 1:
        evaluators.reverse()
    results = evaluate(evaluators)
    held = {f"{task}/{metric}": value for task, res in results.items() for metric, value in res.items()}
    return held, mean_over_ranks(results)
