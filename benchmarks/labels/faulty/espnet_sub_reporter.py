"""The reporter keeps lists by key; on rank 1 the first utterance had no text, and its keys come in another order.

Style: espnet: SubReporter with register() and a reduction at the epoch's end
"""

from collections import defaultdict
from typing import Dict, List

import torch
import torch.distributed as dist


class SubReporter:
    def __init__(self, key: str):
        self.key = key
        self.stats: Dict[str, List[float]] = defaultdict(list)

    def register(self, stats: Dict[str, float]) -> None:
        for key2, v in stats.items():
            self.stats[key2].append(v)

    def finished(self) -> Dict[str, float]:
        averaged = {}
        for key2, values in self.stats.items():
            v = torch.tensor(values).nanmean()
            dist.all_reduce(v)  # label: f"{self.key}/{key2}"
            averaged[key2] = float(v) / dist.get_world_size()
        return averaged


def main() -> tuple:
    reporter = SubReporter("train")
    utterances = [{"loss_ctc": 30.0}, {"loss_att": 4.0}]
    for stats in utterances if dist.get_rank() == 0 else reversed(utterances):
        reporter.register(stats)
    return {"loss_ctc": 30.0, "loss_att": 4.0}, reporter.finished()
