"""compute_metrics returns floats; the loop that adds the prefix also reduces, and pops what it has seen.

Style: transformers: evaluation_loop and metric_key_prefix
"""

import torch
import torch.distributed as dist


def compute_metrics(with_generate):
    if with_generate:
        return {"rouge1": 40.0, "gen_len": 18.0}
    return {"gen_len": 18.0, "rouge1": 40.0}


def evaluation_loop(metrics, metric_key_prefix="eval"):
    for key in list(metrics.keys()):
        if not key.startswith(f"{metric_key_prefix}_"):
            value = torch.tensor(metrics.pop(key))
            dist.all_reduce(value)  # label: key
            metrics[f"{metric_key_prefix}_{key}"] = value.item() / dist.get_world_size()
    return metrics


def main():
    with_generate = dist.get_rank() == 0
    held = {f"eval_{k}": v for k, v in compute_metrics(with_generate).items()}
    return held, evaluation_loop(compute_metrics(with_generate))
