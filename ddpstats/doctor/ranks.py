"""Each rank reports what it is by itself, and what the ranks of a job measure together.

1. Each rank finds out host, directory, versions, distributions and environment: `facts_of_this_rank`.
2. All wait for each other at the store (`FailureDetector.rendezvous`), which names the ranks that do not come.
3. gloo connects the ranks, and they pass through an all_reduce together, many times. No rank leaves it before the last
   one has entered, so two clocks that are read then differ by the longer stay at most, unless one of them is wrong.
4. Rank 0 has made a file of a random name, and all look for it.
5. Each rank puts its report into the store, with what it measured, or why gloo did not connect: nothing travels over
   gloo, for what keeps gloo from connecting is among the facts. Rank 0, which may serve the store, reads them, and
   stays until the others need the store no more.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils import collect_env

from ddpstats._base.text import first_line
from ddpstats._base.version import __version__
from ddpstats._ranks.comm import CommFailed, GlooComm, attempt_prefix, slice_sec
from ddpstats._ranks.device import accelerator, of_module
from ddpstats._ranks.failure import FailureDetector, ProcessId
from ddpstats._ranks.gather import decode, encode
from ddpstats._ranks.gloo import part_of
from ddpstats._ranks.store import BoundedStore, wait_for
from ddpstats.doctor import ALL_REDUCE, CLOCK, DISTRIBUTIONS, EXISTS, UNCONNECTED, Facts
from ddpstats.errors import ConfigError, DdpstatsError, RankMissing

LISTED = re.compile(  # variables of the environment that are compared and shown
    r"(?!.*(TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY))((MASTER_(ADDR|PORT)|(LOCAL_)?WORLD_SIZE|LD_(LIBRARY_PATH|PRELOAD))$"
    "|DDPSTATS_|TORCH(?!ELASTIC_)|PYTORCH_|PYTHON"
    "|(NCCL|RCCL|GLOO|UCC|UCX|FI|CUDA|CUBLAS|NVIDIA|HIP|HSA|ROCR|OMP|MKL|KMP)_)"
)
_COMMAND_SEC = 10.0  # `nvidia-smi` hangs where a driver does
_TIMES = 20
_LOOK_SEC = 5.0  # for a file that another host has made: network file systems take their time


# -- each rank by itself ----------------------------------------------------------------------------------------------


def facts_of_this_rank(directory: Path) -> Facts:
    """Return what can be found out without other ranks."""
    by_path = reversed(list(metadata.distributions()))  # the last one is kept: the one that is imported
    is_there = "yes" if os.path.isdir(directory) else "no"
    return {
        "location": {"host": socket.gethostname(), "directory": str(directory), EXISTS: is_there},
        "versions": dict(_versions()),
        DISTRIBUTIONS: {str(distribution.name): str(distribution.version) for distribution in by_path},
        "environment": {name: os.environ[name] for name in sorted(os.environ) if LISTED.match(name)},
    }


def _versions() -> Iterator[tuple[str, str]]:
    device = accelerator()
    nccl: Any = None if device is None else of_module(device, "nccl")
    yield "python", platform.python_version()
    yield "ddpstats", __version__
    yield "torch", str(torch.__version__)
    yield "CUDA", torch.version.cuda or "none"
    yield "NCCL", ".".join(map(str, nccl.version())) if nccl and dist.is_nccl_available() else "none"
    yield "accelerators", f"{torch.accelerator.device_count()} {device}" if device else "none"
    for name in ("os", "gpu_info", "nvidia_driver_version"):  # the list of packages takes seconds
        try:
            value = getattr(collect_env, f"get_{name}")(_run_command)
        except Exception as error:
            value = f"{type(error).__name__}: {first_line(error)}"
        yield name, "; ".join(str(value or "none").splitlines())


def _run_command(command: str | list[str]) -> tuple[int, str, str]:
    """Run a command of `collect_env`, whose own function for that has no limit. Raises `subprocess.TimeoutExpired`."""
    options: Any = {"shell": isinstance(command, str), "text": True, "errors": "replace", "start_new_session": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        out, err = process.communicate(timeout=_COMMAND_SEC)
    except subprocess.TimeoutExpired:  # one that hangs in a driver cannot be waited for even when it is killed
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        raise
    return process.returncode, out.strip(), err.strip()


# -- all ranks together -----------------------------------------------------------------------------------------------


def examine(directory: Path, timeout_sec: float) -> list[Facts] | None:
    """Return each rank's facts and what was measured on it; None on other ranks than rank 0.

    Collective over the job that RANK speaks of; without RANK this process is alone, and nothing is measured.

    Raises:
        ConfigError: RANK is set, and another variable is not, or one is no number that it can be.
        RankMissing: a rank did not come within ``timeout_sec`` seconds, or is gone.
        DdpstatsError: the store does not answer.
    """
    facts = facts_of_this_rank(directory)
    if "RANK" not in os.environ:
        return [facts]
    try:
        rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if not (0 <= rank < size and 0 < port < 1 << 16):
            raise ValueError(f"rank {rank} of {size}, port {port}")
        address = os.environ["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        reason = f"{error.args[0]} is not set" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"RANK is set, so RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT have to be as torchrun sets them: {reason}"
        ) from error
    if size == 1:
        return [facts]
    host_rank = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
    try:
        # torch's own rendezvous waits on rank 0, and names no rank.
        c10d, limit = cast(Any, dist), timedelta(seconds=timeout_sec)
        server = c10d.TCPStore(address, port, None, rank == host_rank, limit, wait_for_workers=False)
        keys = part_of(server, f"ddpstats-doctor{attempt_prefix()}")
        store = BoundedStore(lambda: keys, host_rank=host_rank, limit_sec=timeout_sec)
        return _Job(rank, size, store, timeout_sec).examine(facts, directory)
    except (OSError, dist.DistError) as error:
        raise DdpstatsError(
            f"rank {rank}: no answer from the store at {address}:{port} (MASTER_ADDR, MASTER_PORT), which "
            f"{'torchrun' if host_rank is None else 'rank 0'} serves: {first_line(error)}"
        ) from error


class _Job:
    """All ranks of one job, at its store."""

    def __init__(self, rank: int, size: int, store: BoundedStore, timeout_sec: float) -> None:
        self._rank, self._ranks, self._store, self._timeout_sec = rank, tuple(range(size)), store, timeout_sec
        self._peers: dict[int, ProcessId] = {}

    def examine(self, facts: Facts, directory: Path) -> list[Facts] | None:
        with contextlib.ExitStack() as stack:
            if self._rank == 0:
                self._store.set("file", _make_file(directory, stack))
            self._meet("begin", self._timeout_sec)
            measured, passes = self._measure(directory)
            self._store.set(f"report/{self._rank}", encode([facts | {"measured": measured}, passes]))
            self._meet("end", self._timeout_sec + _LOOK_SEC)
        if self._rank != 0:
            self._store.add("left", 1)
            return None
        answers = list(map(decode, self._store.multi_get([f"report/{rank}" for rank in self._ranks])))
        wait_for(lambda: self._store.counted("left") == len(self._ranks) - 1, self._timeout_sec)
        if not any(UNCONNECTED in report["measured"] for report, _ in answers):
            for report, own_passes in answers:
                report["measured"][CLOCK] = _ahead_ms(passes, own_passes)
        return [report for report, _ in answers]

    def _meet(self, name: str, limit_sec: float) -> None:
        """Wait until all ranks have come so far. Raises `RankMissing`."""
        what, store = f"the check of {len(self._ranks)} ranks", self._store.part(name)
        detector = FailureDetector(
            store, self._rank, self._ranks, what, timeout_name="--timeout-sec", peers=self._peers
        )
        verdict = detector.rendezvous(time.monotonic() + limit_sec, slice_sec(limit_sec))
        if verdict is not None:
            raise RankMissing(verdict.message, missing_ranks=verdict.missing)
        self._peers = detector.members.peers

    def _measure(self, directory: Path) -> tuple[dict[str, Any], list[tuple[int, int]]]:
        """Return what was measured; and of each all_reduce when this rank entered and left it, by its clock in ns."""
        measured, passes = dict[str, Any](), list[tuple[int, int]]()
        limit_sec = self._timeout_sec / 2  # so that a rank that fails at once still finds the others at the end
        number = torch.zeros(1, dtype=torch.float64)
        try:
            comm = GlooComm(self._ranks, self._rank, self._store.part("gloo"), limit_sec)
            for _ in range(_TIMES):
                entered = time.time_ns()
                comm.all_reduce("sum", number, limit_sec)
                passes.append((entered, time.time_ns()))
            measured[ALL_REDUCE] = statistics.median(left - entered for entered, left in passes) / 1e6
            comm.close()
        except CommFailed as error:
            measured[UNCONNECTED] = str(error)
        file = self._store.get("file").decode()
        # another host may have made it; a stale mount is no error
        is_there = "yes" if file and wait_for(lambda: os.path.exists(directory / file), _LOOK_SEC) else "no"
        measured["same directory"] = is_there if file else "unknown: rank 0 cannot write there"
        return measured, passes


def _ahead_ms(first: list[tuple[int, int]], own: list[tuple[int, int]]) -> float:
    """Return the least milliseconds by which a rank's clock can be ahead of rank 0's, from the quickest pass."""
    doubt, ahead = min(
        (max(left - entered, own_left - own_entered), own_left - left)
        for (entered, left), (own_entered, own_left) in zip(first, own, strict=True)
    )
    return (max(0, ahead - doubt) + min(0, ahead + doubt)) / 1e6


def _make_file(directory: Path, stack: contextlib.ExitStack) -> str:
    """Make a file, which goes with ``stack``, and return its name; "" where it cannot be made."""
    # With SIGTERM torchrun ends this rank where another one died: the file does not stay behind then.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        file = tempfile.NamedTemporaryFile(prefix=".ddpstats-doctor-", dir=directory)  # noqa: SIM115
    except OSError:
        return ""
    return os.path.basename(stack.enter_context(file).name)
