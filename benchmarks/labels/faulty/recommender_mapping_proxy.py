"""AUC by country is handed out as a read-only view; countries come in the order of each rank's traffic.

Style: recommender: MappingProxyType
Mechanism: a read-only view of a dict
"""

from types import MappingProxyType

import torch
import torch.distributed as dist


class GroupedAUC:
    def __init__(self):
        self._groups = {}

    def update(self, country, auc):
        self._groups[country] = auc

    @property
    def groups(self):
        return MappingProxyType(self._groups)


def main():
    metric = GroupedAUC()
    traffic = [("us", 0.5), ("jp", 8.0)]
    for country, auc in traffic if dist.get_rank() == 0 else traffic[::-1]:
        metric.update(country, auc)
    report = []
    for country in metric.groups:
        auc = torch.tensor(metric.groups[country], dtype=torch.float64)
        dist.all_reduce(auc)  # label: country
        report.append((f"auc/{country}", auc.item() / dist.get_world_size()))
    return {f"auc/{country}": auc for country, auc in traffic}, dict(report)
