"""``program.py DEVICE CASE``: a training program of two ranks, right or with one fault, for `test_guard`."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from tests.gpu.accelerator import backend_of, keep_busy, name_hosts, register

DEVICE, CASE = sys.argv[1:]
RANK = int(os.environ["RANK"])


def join(timeout_sec: float) -> None:
    timeout = timedelta(seconds=timeout_sec)
    register(DEVICE)
    if DEVICE == "cuda":
        name_hosts(RANK)
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda:0"))
        return
    dist.init_process_group(backend_of(DEVICE), timeout=timeout)


def train(steps: int = 6) -> None:
    """Train under autocast and a GradScaler; in some step, rank 1 does what the case says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 1)).to(DEVICE)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(DEVICE)
    for step in range(steps):
        if step == 3 and RANK == 1:
            fail()
        generator = torch.Generator().manual_seed(10 * step + RANK)
        x = torch.randn(16, 32, generator=generator).to(DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = ddp(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        mean.item()
    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in ddp.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)


def fail() -> None:
    if CASE == "raises":
        raise ValueError("bad batch")
    if CASE == "dies":
        os._exit(7)
    if CASE == "late":
        time.sleep(40)


def skip_one() -> None:
    """Let rank 1 leave out one all_reduce of five."""
    for step in range(5):
        if (step, RANK) != (3, 1):
            value = torch.ones(4, device=DEVICE)
            dist.all_reduce(value)
            value.sum().item()


def differ() -> None:
    """Give one functional collective of rank 1 another reduce op: its result is waited for in C++ and on the device."""
    world = dist.group.WORLD
    assert world is not None
    for step in range(4):
        op = "max" if (step, RANK) == (2, 1) else "sum"
        functional.all_reduce(torch.ones(3, device=DEVICE), op, world).sum().item()


def send_more() -> None:
    """Send a message that is longer than its receiver expects."""
    for step in range(3):
        if RANK == 0:
            dist.send(torch.ones(8 if step == 1 else 4, device=DEVICE), 1)
        else:
            value = torch.empty(4, device=DEVICE)
            dist.recv(value, 0)
            value.sum().item()
    value = torch.ones((), device=DEVICE)
    dist.all_reduce(value)
    value.item()  # otherwise the sender may have ended before its message is received


def meet_late() -> None:
    """Come to a barrier late, and with a device that has work for a while: both are legal."""
    for turn in range(2):
        if turn == RANK:
            time.sleep(2.5)
            keep_busy(DEVICE)
        dist.barrier()
    value = torch.ones(3, device=DEVICE)
    dist.all_reduce(value)
    print("weights", value.tolist(), flush=True)


if __name__ == "__main__":
    join(8 if CASE == "late" else 60)
    programs = {"skips": skip_one, "differs": differ, "sends more": send_more, "barriers": meet_late}
    programs.get(CASE, train)()
    dist.destroy_process_group()
