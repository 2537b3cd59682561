"""How the suites of other libraries are run: without ddpstats, with its patches, and with a guard besides."""

from __future__ import annotations

import os
import subprocess
import sys

WITH_US = ("patched", "strict", "step")
LIMIT_SEC = 900.0  # of one run; alone on two cores the longest takes two minutes


def run(library: str, way: str, module: str, *arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a module of this folder in the given way, "bare" or one of `WITH_US`; on ranks of torchrun if any.

    The module calls `install_patches` before it does anything else.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDPSTATS_")}
    environment.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore")
    if way != "bare":
        environment["SUITE_PATCHES"] = library
    if way in ("strict", "step"):
        environment["DDPSTATS_GUARD"] = way
    launcher: list[str] = []
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher += ["--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "-m", f"benchmarks.{module}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SEC, check=False)


def install_patches() -> None:
    """Install the patches that the environment names; importing ddpstats begins the guard of DDPSTATS_GUARD."""
    library = os.environ.get("SUITE_PATCHES")
    if library is not None:
        import ddpstats

        installed = ddpstats.integrations.install(library)
        assert installed.patched == (library,), installed
