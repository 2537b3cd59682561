"""A reduction gives the right stats under every launcher, and the error of the survivors names a killed rank."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import FAR, NEAR
from tests.needs import ROOT, needs
from tests.programs import Program, reserved_port

LIMIT_SEC = 240.0
TRAIN = str(ROOT / "tests" / "launchers" / "train.py")
TORCHRUN = ["-m", "torch.distributed.run"]
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
STATS = {"loss": 1.5, "l1": 10.0, "snr": 20.0}


def outputs_of(
    commands: Sequence[Sequence[str]],
    environs: Sequence[Mapping[str, str]],
    prefixes: Sequence[Sequence[str]] = ((), ()),
) -> list[str]:
    """Run the commands at the same time, with ranks that are interpreters, and return what each writes."""
    common = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(Program(command, {**common, **environ}, prefix=prefix, fresh_children=True))
            for command, environ, prefix in zip(commands, environs, prefixes, strict=False)
        ]
        return [done.stdout + done.stderr for done in [program.finish(LIMIT_SEC) for program in programs]]


def ranks_of(directory: Path, outputs: Sequence[str]) -> list[dict[str, Any]]:
    files = [directory / "0.json", directory / "1.json"]
    assert all(file.exists() for file in files), "\n".join(outputs)
    reports = [json.loads(file.read_text()) for file in files]
    assert [(each["rank"], each["of"], each["stats"]) for each in reports] == [(0, 2, STATS), (1, 2, STATS)]
    return reports


ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"),
    *("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
]


@pytest.mark.parametrize(
    ("command", "how"),
    [
        pytest.param(
            *([*TORCHRUN, "--standalone", "--nproc-per-node=2"], "environment"), id="torchrun", marks=pytest.mark.slow
        ),
        pytest.param(ACCELERATE, "accelerate", id="accelerate launch", marks=pytest.mark.library),
        pytest.param([], "spawn", id="multiprocessing.spawn", marks=pytest.mark.slow),
        pytest.param([], "ray", id="Ray Train", marks=pytest.mark.library),
    ],
)
def test_a_launcher_that_ends_the_survivors_names_the_killed_rank(command: list[str], how: str, tmp_path: Path) -> None:
    if how in ("accelerate", "ray"):
        needs(how)
    with reserved_port() as port:
        outputs = outputs_of([[*command, TRAIN, str(tmp_path), how]], [{"MASTER_PORT": str(port), **RAY}])
    first, _ = ranks_of(tmp_path, outputs)
    if "missing" in first:  # it came to say so before it was ended
        assert first["missing"] == [1]
    if how == "spawn":
        assert "process 1 terminated with signal SIGKILL" in outputs[0]
    elif how == "ray":  # it looks every two seconds
        assert "world_rank=1" in outputs[0]
        assert "The actor died unexpectedly" in outputs[0]
    else:
        assert "local_rank: 1" in outputs[0]
        assert "Signal 9 (SIGKILL)" in outputs[0]


@pytest.mark.library
def test_a_survivor_under_lightning_names_the_killed_rank(tmp_path: Path) -> None:
    """Lightning looks every 5 s whether a rank died, and then kills all: in some runs before the survivor speaks."""
    needs("lightning")
    for run in ("first", "second", "third"):
        directory = tmp_path / run
        directory.mkdir()
        outputs = outputs_of([[TRAIN, str(directory), "lightning"]], [{}])
        first, _ = ranks_of(directory, outputs)
        if "missing" in first:
            break
        assert "Forcefully terminating all other processes" in outputs[0]
    assert first.get("missing") == [1], outputs
    assert "rank 1: the process is gone" in first["text"]


def test_a_survivor_under_slurms_variables_names_the_killed_rank(tmp_path: Path) -> None:
    with reserved_port() as port:
        common = {"SLURM_NTASKS": "2", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environs = [{**common, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
        outputs = outputs_of([[TRAIN, str(tmp_path), "slurm"]] * 2, environs)
    first, _ = ranks_of(tmp_path, outputs)
    assert first.get("missing") == [1], outputs
    assert "rank 1: the process is gone" in first["text"]


@pytest.mark.slow
def test_a_survivor_on_another_host_names_the_killed_rank(hosts: tuple[str, str, str, str], tmp_path: Path) -> None:
    """The ranks have a torchrun each, on hosts with different addresses and names."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here, which gives a program a host name of its own")
    near, far, near_link, far_link = hosts
    commands, environs, prefixes = [], [], []
    for node, (space, link, address) in enumerate(((near, near_link, NEAR), (far, far_link, FAR))):
        train = [*TORCHRUN, "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"]
        train += [f"--local-addr={address}", f"--master-addr={NEAR}", "--master-port=29512"]
        train += [TRAIN, str(tmp_path), "environment"]
        commands.append(train)
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', f"host{node}"]
        prefixes.append(["ip", "netns", "exec", space, "unshare", "--uts", *named])
        environs.append({"GLOO_SOCKET_IFNAME": link, "DDPSTATS_TIMEOUT_SEC": "8"})
    outputs = outputs_of(commands, environs, prefixes)
    first, second = ranks_of(tmp_path, outputs)
    assert (first["host"], second["host"]) == ("host0", "host1")
    assert first.get("missing") == [1], outputs
    assert "rank 1" in first["text"]
