"""Writes the files that `test_formats` reads: ``python -m tests.formats.make tests/formats/vN``, once for each format.

Each file comes from a small run of the public functions. The name of the host and the paths of program and dump are
taken out.
"""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddpstats
from ddpstats.dump import record
from ddpstats.guard import collective_guard
from ddpstats.testing import run_ranks

ROOT = Path(__file__).parents[2]
NAMES = {"bundle": "captures", "dump": "dump", "killed": "killed", "records": "records", "config": "config.json"}
BATCH = {"x": [1.0, -1.0], "names": ["a", "b"]}


class Net(nn.Module):
    """A model of two weights, whose gradient is not finite where a root is taken of a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sqrt()


def batch() -> dict[str, Any]:
    return {**BATCH, "x": torch.tensor(BATCH["x"])}


def write_bundle(directory: Path) -> None:
    model = Net()
    with mock.patch.object(socket, "gethostname", return_value="host"):
        capture = ddpstats.NaNCapture(directory, model=model)
        inputs = batch()
        with capture.micro_batch(inputs):
            model(inputs["x"]).sum().backward()
        assert capture.check().should_stop
        capture.close()


def write_dumps(finished: Path, killed: Path) -> None:
    program = compile("def step(model, x):\n    return model(x).sum().backward()\n", "train.py", "exec")
    names: dict[str, Any] = {}
    exec(program, names)
    for path, ends in ((finished, True), (killed, False)):
        model = Net()
        task = "tensor" if ends else "statistics"
        dump = ddpstats.StatsDump(
            {"dump_path": str(path), "level": "mix", "task": task, task: {"list": ["sqrt", "Net.forward"]}}, model=model
        )
        dump.start()
        names["step"](model, batch()["x"])
        if ends:
            dump.step()
        else:
            dump.stop()  # lines, as of a process that ends inside a step
            record._unfinished.clear()


def recorded(directory: str) -> None:
    with collective_guard("record", record_dir=directory), ddpstats.label("loss"):
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(1 + dist.get_rank()), 0)


def write_config(path: Path) -> None:
    section = {"scope": [], "list": ["linear"], "tensor_list": [], "data_mode": ["all"], "summary_mode": "md5"}
    content = {"task": "statistics", "dump_path": "dump", "rank": [0, "2-3"], "step": [1], "level": "L1"}
    path.write_text(json.dumps({**content, "statistics": section}, indent=1))


def without_places(directory: Path) -> None:
    """Take the paths of this machine out of all text files."""
    for path in directory.rglob("*.json*"):
        text = path.read_text().replace(str(directory.resolve()), "/runs").replace(f"{ROOT}/", "")
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir()
    torch.manual_seed(1)
    write_bundle(directory / NAMES["bundle"])
    write_dumps(directory / NAMES["dump"], directory / NAMES["killed"])
    run_ranks(recorded, 2, str(directory / NAMES["records"])).values()
    write_config(directory / NAMES["config"])
    without_places(directory)


if __name__ == "__main__":
    from tests.formats import make  # what ranks run is of a module

    make.main()
