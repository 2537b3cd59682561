"""Run torcheval's own tester of metrics, which its wheel ships, on metrics of torcheval, each with random updates.

The tester merges the metrics of four processes. torchelastic starts them, here from a server that has imported torch,
and each imports this file again, so that the patches are installed there, too.
"""

from __future__ import annotations

import copy
import functools
import importlib
import multiprocessing
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import suites

UPDATES = 8  # by four processes, as in torcheval's own tests
BATCH = 16


def _init_from_env(device_type: str) -> torch.device:
    dist.init_process_group("gloo")
    return torch.device(device_type)


stand_in: Any = types.ModuleType("torchtnt.utils")  # a library of which the tester uses two functions
stand_in.init_from_env = _init_from_env
stand_in.copy_data_to_device = lambda data, device: data
sys.modules.setdefault("torchtnt", types.ModuleType("torchtnt"))
sys.modules.setdefault("torchtnt.utils", stand_in)
suites.install_patches()
metrics: Any = importlib.import_module("torcheval.metrics")
tester: Any = importlib.import_module("torcheval.utils.test_utils.metric_class_tester")


def main() -> None:
    multiprocessing.set_forkserver_preload(["torch", "torcheval.metrics"])
    tester.pet.LaunchConfig = functools.partial(tester.pet.LaunchConfig, start_method="forkserver")
    scores = torch.rand(UPDATES, BATCH)
    labels = torch.randint(0, 2, (UPDATES, BATCH))
    classes = torch.randint(0, 5, (UPDATES, BATCH))
    logits = torch.rand(UPDATES, BATCH, 5)
    cases: list[tuple[Any, dict[str, torch.Tensor]]] = [
        (metrics.Mean(), {"input": scores}),
        (metrics.Max(), {"input": scores}),
        (metrics.Cat(), {"input": scores}),
        (metrics.BinaryAUROC(), {"input": scores, "target": labels}),
        (metrics.MulticlassAccuracy(), {"input": logits, "target": classes}),
        (metrics.MulticlassConfusionMatrix(5), {"input": logits, "target": classes}),
        (metrics.MeanSquaredError(), {"input": scores, "target": torch.rand(UPDATES, BATCH)}),
        (metrics.R2Score(), {"input": scores, "target": torch.rand(UPDATES, BATCH)}),
    ]
    case = tester.MetricClassTester()
    for metric, updates in cases:
        alone = copy.deepcopy(metric)
        for number in range(UPDATES):
            alone.update(**{name: values[number] for name, values in updates.items()})
        names = set(metric.state_dict())
        case.run_class_implementation_tests(metric, names, updates, alone.compute(), test_devices=["cpu"])
        print(type(metric).__name__, flush=True)


if __name__ == "__main__":
    main()
