"""A training loop of two ranks as people start it: `python train.py DIRECTORY HOW`, under the launcher HOW.

Each rank reduces stats whose keys differ between the ranks, and leaves the result in DIRECTORY as RANK.json. Then
rank 1 is killed, and rank 0 adds the error that it gets, if its launcher lets it live for so long.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, TensorDataset

import ddpstats


def loop(directory: Path) -> None:
    """Reduce, and reduce again without rank 1, in the process group that the launcher made."""
    rank = dist.get_rank()
    stats = {"loss": torch.tensor(1.0 + rank), ("l1" if rank == 0 else "snr"): torch.tensor(10.0 * (rank + 1))}
    report: dict[str, Any] = {"rank": rank, "of": dist.get_world_size(), "host": socket.gethostname()}
    report["stats"] = {key: float(value) for key, value in ddpstats.reduce_stats(stats).values.items()}
    leave(directory, report)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ddpstats.reduce_stats(stats)
    except ddpstats.RankMissing as error:
        leave(directory, {**report, "missing": list(error.missing_ranks), "text": str(error)})
        raise


def leave(directory: Path, report: dict[str, Any]) -> None:
    made = directory / f"{report['rank']}.tmp"
    made.write_text(json.dumps(report))
    made.rename(directory / f"{report['rank']}.json")


def by_environment(directory: Path) -> None:
    """torchrun does this, and all that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    dist.init_process_group("gloo")
    loop(directory)


def by_slurm(directory: Path) -> None:
    """srun sets SLURM_PROCID and SLURM_NTASKS; the batch script, where the ranks meet."""
    dist.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
    loop(directory)


def _spawned(rank: int, port: int, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    loop(directory)


def by_spawn(directory: Path) -> None:
    spawn(_spawned, (int(os.environ["MASTER_PORT"]), directory), nprocs=2)  # type: ignore[no-untyped-call]


def by_accelerate(directory: Path) -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True)
    loop(directory)


def by_lightning(directory: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loop(directory)
            loss: torch.Tensor = self.layer(batch[0]).sum()
            return loss

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))


def _worker(config: dict[str, str]) -> None:
    loop(Path(config["directory"]))


def by_ray(directory: Path) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    kept = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # the names of its sockets must be short
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=kept)
    try:
        TorchTrainer(
            _worker,
            train_loop_config={"directory": str(directory)},
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchConfig("gloo"),
            run_config=RunConfig(storage_path=str(directory / "ray")),
        ).fit()
    finally:
        ray.shutdown()
        shutil.rmtree(kept, ignore_errors=True)


HOW = {
    "environment": by_environment,
    "slurm": by_slurm,
    "spawn": by_spawn,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "ray": by_ray,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    HOW[sys.argv[2]](Path(sys.argv[1]))
