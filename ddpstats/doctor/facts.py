"""What one rank is: place, versions, libraries, environment, time limits. Local; sections of names and plain texts."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpstats._base import config
from ddpstats._base.version import __version__
from ddpstats.doctor.report import EXISTS, Told
from ddpstats.errors import ConfigError
from ddpstats.integrations.patches import PATCHABLE, trial

_NAMES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LD_LIBRARY_PATH", "LD_PRELOAD")
_PREFIXES = (
    *("DDPSTATS_", "TORCH", "PYTORCH_", "PYTHON"),
    *("NCCL_", "RCCL_", "GLOO_", "UCC_", "UCX_", "FI_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_", "HIP_", "HSA_", "ROCR_"),
    *("OMP_", "MKL_", "KMP_"),
)
_OF_THE_LAUNCHER = "TORCHELASTIC_"  # files and counts of its own: some differ by rank
_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY")


def of_this_rank(directory: Path, try_libraries: bool) -> Told:
    """``try_libraries``: import each library that an integration patches, and try whether it would."""
    environment = {name: os.environ[name] for name in sorted(os.environ) if _is_listed(name)}  # libraries add to it
    return {
        "place": {"host": socket.gethostname(), "directory": str(directory), EXISTS: _exists(directory)},
        "versions": dict(_versions()),
        "integrations": {name: trial(name) for name in PATCHABLE} if try_libraries else {},
        "environment": environment,
        "timeouts": _timeouts(),
    }


def _exists(directory: Path) -> str:
    try:
        os.stat(os.path.join(directory, ""))  # with a slash at its end, a file is none
    except OSError as error:
        return f"no ({error.strerror})"
    return "yes"


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    yield "ddpstats", __version__
    yield "torch", str(torch.__version__)
    yield "CUDA", torch.version.cuda or "none"
    nccl: Any = torch.cuda.nccl
    yield "NCCL", ".".join(map(str, nccl.version())) if dist.is_nccl_available() else "none"
    for name in ("numpy", *PATCHABLE, "pytorch_lightning", "transformers"):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"


def _is_listed(name: str) -> bool:
    is_chosen = name in _NAMES or (name.startswith(_PREFIXES) and not name.startswith(_OF_THE_LAUNCHER))
    return is_chosen and not _SECRET.search(name)


def _timeouts() -> dict[str, str]:
    """What a call has that names none."""
    try:
        ours = f"{config.timeout_sec(None):g} s"
    except ConfigError as error:
        ours = str(error)
    defaults = {"gloo": dist.constants.default_pg_timeout, "NCCL": dist.constants.default_pg_nccl_timeout}
    theirs = {name: f"{limit.total_seconds():g} s" for name, limit in defaults.items() if limit is not None}
    return {"ddpstats": ours, **theirs}
