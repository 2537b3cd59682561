"""One step, dumped by msprobe or by ddpstats, for every level and task; in one process, and on two ranks.

``python -m tests.dump.msprobe_runs TOOL ROOT`` writes ``ROOT/TOOL-{ranks}/{level}-{task}/``. msprobe has one debugger
in a process, and its import takes seconds: each dump is made in a fork.
"""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

LEVELS, TASKS = ("L0", "L1", "mix"), ("statistics", "tensor")
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.uint8, torch.bool)


class Net(nn.Module):
    """Layers and functions of which the two tools may record different things."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm, self.fc = nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.drop, self.id, self.noise = nn.Dropout(0.0), nn.Identity(), nn.Dropout(0.5)
        self.conv, self.bn = nn.Conv1d(8, 8, 3, padding=1, bias=False), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.act, self.pool = nn.ReLU(inplace=True), nn.MaxPool1d(2)
        self.gru, self.out = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.emb(x))
        h = h + self.id(self.drop(torch.relu(self.fc(h))))
        h = h.add(h * 2) - 1
        h += 1
        h = self.conv(self.noise(h).transpose(1, 2)).transpose(1, 2)
        h = self.bn(h.reshape(-1, 8)).view(4, 5, 8)
        h = self.act(h + self.attention(h, h, h, need_weights=False)[0])
        h = torch.cat([h, self.gru(h)[0]], dim=-1)[..., :8]
        scores = torch.matmul(h, h.transpose(1, 2)) / 8**0.5
        scores = scores.masked_fill(torch.tril(torch.ones(5, 5)) == 0, float("-inf"))
        h = torch.softmax(scores, dim=-1) @ h
        h = torch.einsum("bij,bij->bij", h, -h)
        h = h + self.pool(h.transpose(1, 2)).mean(-1, keepdim=True).transpose(1, 2)
        out: Tensor = self.out(h).mean(1)
        values = out.detach()
        for changed in (*map(values.to, DTYPES), values[:0], values.sum(), values / 0):
            torch.mul(changed, 2)
        return out


def run_collectives(rank: int, ranks: int) -> None:
    values = torch.arange(3.0) + rank
    dist.all_reduce(values)
    dist.broadcast(values, 1)
    dist.all_gather([torch.zeros(3) for _ in range(ranks)], values)
    if rank:
        dist.recv(torch.zeros(3), 0)
    else:
        dist.send(values, 1)


def dump_step(tool: str, root: Path, config: dict[str, Any], rank: int, ranks: int) -> None:
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{root.absolute()}/store", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    net, tokens, labels = Net(), torch.randint(0, 10, (4, 5)), torch.tensor([0, 1, 2, 3])
    model: nn.Module = nn.parallel.DistributedDataParallel(net) if ranks > 1 else net
    if tool == "msprobe":
        path = root / f"config{rank}.json"
        path.write_text(json.dumps(config))
        debugger = importlib.import_module("msprobe.pytorch").PrecisionDebugger(str(path))
    else:
        debugger = importlib.import_module("ddpstats").StatsDump(config, model=model)
    torch.manual_seed(rank)
    debugger.start(model=model)
    if ranks > 1:
        run_collectives(rank, ranks)
    torch.autograd.backward(functional.cross_entropy(model(tokens), labels))
    debugger.stop()
    debugger.step()


def main(tool: str, root: str) -> None:
    if tool == "msprobe":
        importlib.import_module("msprobe.pytorch")
    context = multiprocessing.get_context("fork")
    for ranks, level, task in itertools.product((1, 2), LEVELS, TASKS):
        path = Path(root, f"{tool}-{ranks}", f"{level}-{task}")
        path.mkdir(parents=True)
        config = {"dump_path": str(path), "level": level, "task": task, "step": [0], "rank": []}
        forks = [context.Process(target=dump_step, args=(tool, path, config, r, ranks)) for r in range(ranks)]
        for fork in forks:
            fork.start()
        for fork in forks:
            fork.join()
        if any(fork.exitcode for fork in forks):
            sys.exit(f"{tool} {level} {task} failed on {ranks} ranks")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
