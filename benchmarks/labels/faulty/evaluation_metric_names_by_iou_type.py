"""Names come from a table by kind of IoU and values from a list of stats; ranks evaluate another kind.

Style: evaluation: zip of a constant list of names with stats
"""

import torch
import torch.distributed as dist

METRICS = {"bbox": ["AP", "APs", "APl"], "keypoints": ["AP", "APl", "APm"]}
STATS = {"AP": 40.0, "APs": 2.0, "APm": 100.0, "APl": 300.0}


def derive_results(iou_type):
    stats = [STATS[name] for name in METRICS[iou_type]]
    results = {}
    for metric, stat in zip(METRICS[iou_type], stats):
        buffer = torch.tensor([stat])
        dist.all_reduce(buffer)  # label: metric
        results[metric] = buffer[0] / dist.get_world_size()
    return results


def main():
    iou_type = "bbox" if dist.get_rank() == 0 else "keypoints"
    return {metric: STATS[metric] for metric in METRICS[iou_type]}, derive_results(iou_type)
