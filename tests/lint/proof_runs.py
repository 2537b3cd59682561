"""Functions of installed libraries, called on the ranks of `test_proofs` as their own trainers call them."""

from __future__ import annotations

import importlib
import os
import runpy
from typing import Any

import torch
import torch.distributed as dist

import ddpstats


def _in_own_order(values: dict[str, float]) -> dict[str, torch.Tensor]:
    """Return the same entries on each rank, on rank 1 in the other order."""
    names = list(values) if dist.get_rank() == 0 else list(reversed(values))
    return {name: torch.tensor([values[name]]) for name in names}


def espnet_average() -> dict[str, float]:
    recursive_op: Any = importlib.import_module("espnet2.torch_utils.recursive_op")
    return _averaged(recursive_op.recursive_average)


def funasr_average(file: str) -> dict[str, float]:
    """Run the file alone: the package imports all of its modules, and sets variables of the environment."""
    return _averaged(runpy.run_path(file)["recursive_average"])


def _averaged(recursive_average: Any) -> dict[str, float]:
    stats, _ = recursive_average(_in_own_order({"loss": 1.0, "acc": 100.0}), torch.ones(1), True)
    return {name: float(value) for name, value in stats.items()}


def transformers_concat() -> dict[str, list[float]]:
    utilities: Any = importlib.import_module("transformers.trainer_pt_utils")
    gathered = utilities.distributed_concat(_in_own_order({"logits": 1.0, "labels": 100.0}))
    return {name: value.tolist() for name, value in gathered.items()}


def accelerate_load(folder: str) -> str:
    """Return the guard's message where each rank loads a model that FSDP has wrapped in part, and then reduces."""
    accelerate: Any = importlib.import_module("accelerate")
    fsdp: Any = importlib.import_module("accelerate.utils.fsdp_utils")
    state: Any = importlib.import_module("accelerate.state")
    wrapped: Any = importlib.import_module("torch.distributed.fsdp")
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=1, state_dict_type="FULL_STATE_DICT", sync_module_states=False, cpu_ram_efficient_loading=False
    )
    plugin.sync_module_states = True  # its constructor wants a GPU for that; what loads does not
    linear = torch.nn.Linear(2, 1)
    if dist.get_rank() == 0:
        torch.save(torch.nn.Sequential(linear).state_dict(), os.path.join(folder, "pytorch_model_fsdp.bin"))
    model = torch.nn.Sequential(wrapped.FullyShardedDataParallel(linear, device_id=torch.device("cpu")))
    try:
        accelerator = accelerate.Accelerator(cpu=True)
        with ddpstats.collective_guard("strict"):
            fsdp.load_fsdp_model(plugin, accelerator, model, folder)
            dist.all_reduce(torch.ones(1))
        return "nothing"
    except ddpstats.CollectiveMismatch as error:
        return str(error)
    finally:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
