"""Each rank finds out what it is: place, versions, distributions, environment. Local; sections of names and texts."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import collect_env

from ddpstats._base.device import accelerator, of_module
from ddpstats._base.text import first_line
from ddpstats._base.version import __version__
from ddpstats.doctor.report import DISTRIBUTIONS, EXISTS, Facts

_LISTED = re.compile(
    "(MASTER_(ADDR|PORT)|(LOCAL_)?WORLD_SIZE|LD_(LIBRARY_PATH|PRELOAD))$|DDPSTATS_|TORCH(?!ELASTIC_)|PYTORCH_|PYTHON"
    "|(NCCL|RCCL|GLOO|UCC|UCX|FI|CUDA|CUBLAS|NVIDIA|HIP|HSA|ROCR|OMP|MKL|KMP)_"
)
_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY")

# Its list of packages takes seconds, and is among the distributions.
_COLLECTED = {name: getattr(collect_env, f"get_{name}", None) for name in ("os", "gpu_info", "nvidia_driver_version")}
_COMMAND_SEC = 10.0  # `nvidia-smi` hangs where a driver does


def facts_of_this_rank(directory: Path) -> Facts:
    """Return what can be found out without other ranks."""
    by_path = reversed(list(metadata.distributions()))  # so that the first one on the path is kept, which is imported
    is_there = "yes" if os.path.isdir(directory) else "no"
    return {
        "place": {"host": socket.gethostname(), "directory": str(directory), EXISTS: is_there},
        "versions": dict(_versions()),
        DISTRIBUTIONS: {str(distribution.name): str(distribution.version) for distribution in by_path},
        "environment": {name: os.environ[name] for name in sorted(os.environ) if is_listed(name)},
    }


def is_listed(variable: str) -> bool:
    """Return whether a variable of the environment is compared and shown."""
    return bool(_LISTED.match(variable)) and not _SECRET.search(variable)


def _versions() -> Iterator[tuple[str, str]]:
    device = accelerator()
    nccl: Any = None if device is None else of_module(device, "nccl")
    yield "python", platform.python_version()
    yield "ddpstats", __version__
    yield "torch", str(torch.__version__)
    yield "CUDA", torch.version.cuda or "none"
    yield "NCCL", ".".join(map(str, nccl.version())) if nccl and dist.is_nccl_available() else "none"
    yield "accelerators", f"{torch.accelerator.device_count()} {device}" if device else "none"
    for name, function in _COLLECTED.items():
        try:
            value = function(_run) if function else "not known to this torch"
        except Exception as error:
            value = f"{type(error).__name__}: {first_line(error)}"
        yield name, "; ".join(str(value or "none").splitlines())


def _run(command: str | list[str]) -> tuple[int, str, str]:
    """Run a command of `collect_env`; its own function for that waits for ever."""
    is_text = isinstance(command, str)
    ended = subprocess.run(
        command, shell=is_text, capture_output=True, text=True, errors="replace", timeout=_COMMAND_SEC
    )
    return ended.returncode, ended.stdout.strip(), ended.stderr.strip()
