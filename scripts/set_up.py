"""Answer what scripts/launch.sh asks of a Python, which may be too old.

`set_up.py torch` prints its program, and the version of its torch: empty below 2.6, or where it has none.
`set_up.py requirements LEVEL` prints what setup.cfg lists: for ddpstats (0), tests of torch alone (1), or all (2).
"""

from __future__ import annotations

import configparser
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

SETUP_CFG = Path(__file__).resolve().parents[1] / "setup.cfg"


def torch_version() -> str:
    """Return the version of this Python's torch, without importing it; empty if it is too old or missing."""
    for distribution in distributions(name="torch"):
        version = distribution.version
        return version if tuple(map(int, version.split(".")[:2])) >= (2, 6) else ""
    return ""


def requirements(extras: Sequence[str]) -> list[str]:
    """Return the requirements of the package and of these extras, as setup.cfg lists them."""
    config = _config()
    lists = [config["options"]["install_requires"], *(config["options.extras_require"][extra] for extra in extras)]
    lines = [line.strip() for text in lists for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _config() -> configparser.RawConfigParser:
    config = configparser.RawConfigParser()
    config.read(SETUP_CFG)
    return config


if __name__ == "__main__":
    if sys.version_info[:2] < (3, 10):  # noqa: UP036
        sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}")
    if sys.argv[1] == "torch":
        print(sys.executable, torch_version(), sep="\n")
    else:
        levels = [], ["testing"], list(_config()["options.extras_require"])
        print(*requirements(levels[int(sys.argv[2])]), sep="\n")
