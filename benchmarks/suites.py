"""How the suites of other libraries are run: without ddpstats, with its patches, and with a guard besides."""

from __future__ import annotations

import os

from tests import programs
from tests.programs import Ended

WITH_US = ("patched", "strict", "step")
LIMIT_SEC = 600.0  # of one run; alone on two cores the longest takes two minutes


def on_ranks(library: str, way: str, module: str, *arguments: str, ranks: int) -> Ended:
    """Run a module of this folder on forked ranks in the given way, "bare" or one of `WITH_US`.

    The module calls `install_patches` before it does anything else.
    """
    return programs.on_ranks(
        *("-m", f"benchmarks.{module}", *arguments), ranks=ranks, limit_sec=LIMIT_SEC, **_environ(library, way)
    )


def alone(library: str, way: str, module: str, *arguments: str) -> Ended:
    """Run a module that starts its own ranks, as `on_ranks` does, in a fresh interpreter."""
    command = ["-m", f"benchmarks.{module}", *arguments]
    done = programs.run(command, timeout=LIMIT_SEC, fresh=True, environ=_environ(library, way))
    return Ended([done.returncode], done.stdout, done.stderr)


def _environ(library: str, way: str) -> dict[str, str]:
    environ = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if way != "bare":
        environ["SUITE_PATCHES"] = library
    if way in ("strict", "step"):
        environ["DDPSTATS_GUARD"] = way
    return environ


def install_patches() -> None:
    """Install the patches that the environment names; importing ddpstats begins the guard of DDPSTATS_GUARD."""
    library = os.environ.get("SUITE_PATCHES")
    if library is not None:
        import ddpstats

        installed = ddpstats.integrations.install(library)
        assert installed.patched == (library,), installed
