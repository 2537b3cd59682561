"""A program that torchrun restarts: rank 1 dies in the first attempt. Run by `test_elastic`.

torchrun --max-restarts N ... tests/faults/restarted.py DIRECTORY

Each rank of each attempt writes down how far it came: what torch itself does first, and then what ddpstats does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in __all__

import ddpstats
from ddpstats.testing import die


def note(directory: Path, **facts: Any) -> None:
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    path = directory / f"{attempt}.{rank}.json"
    path.with_suffix(".new").write_text(json.dumps(facts))
    path.with_suffix(".new").replace(path)


def give_up(directory: Path) -> None:
    """Play the first attempt: rank 0 comes to two verdicts on rank 1, which does not use ddpstats and then dies."""
    if dist.get_rank() == 1:
        deadline = time.monotonic() + 60
        while "verdicts" not in (directory / "0.0.json").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        die()
    verdicts = []
    for call in (_reduce, _watched):
        try:
            call()
        except ddpstats.RankMissing as error:
            verdicts.append(error.missing_ranks)
    note(directory, came="torch works", verdicts=verdicts)
    time.sleep(60)  # until torchrun ends it


def _reduce() -> None:
    ddpstats.StatsReducer(timeout_sec=2)({"loss": 1.0})


def _watched() -> None:
    with ddpstats.collective_guard("strict", timeout_sec=2):
        dist.all_reduce(torch.ones(1))


def checked(directory: Path, attempt: str) -> dict[str, Any]:
    """Take two steps with all checks on."""
    rank, model = dist.get_rank(), torch.nn.Linear(2, 1)
    reducer = ddpstats.StatsReducer(name="train", timeout_sec=20)
    window = ddpstats.StatsWindow(name="window", timeout_sec=20)
    with (
        ddpstats.collective_guard("step", timeout_sec=20) as guard,
        ddpstats.NaNCapture(directory / "captures", model=model) as capture,
        ddpstats.Sentinel(model, mode=2) as sentinel,
    ):
        checks = ddpstats.StepChecks(capture=capture, sentinel=sentinel, guard=guard)
        for _ in range(2):
            window.add({"loss": float(rank)})
            dist.all_reduce(torch.ones(1))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            ok = checks.step().ok
            values = reducer({"loss": float(rank), f"attempt {attempt}": 1.0}).values
    return {"ok": ok, "values": values, "window": window.flush().values}


def forget_torch(attempt: str) -> None:
    """Delete what torch and its gloo had in the store, as a new store would: torch 2.13 may take it for today's."""
    made: Any = TCPStore
    store = made(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "0":
        for key in store.list_keys():
            if "ddpstats" not in key:
                store.delete_key(key)
        store.set(f"ddpstats test, attempt {attempt}", "1")
    store.wait([f"ddpstats test, attempt {attempt}"], timedelta(seconds=60))


def main(directory: Path) -> None:
    note(directory, came="started")
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt != "0":
        forget_torch(attempt)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1))
    note(directory, came="torch works")
    if attempt == "0":
        give_up(directory)
    try:
        results = checked(directory, attempt)
    except Exception as error:
        note(directory, came="torch works", raised=type(error).__name__, text=str(error))
        raise
    note(directory, came="all", **results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
