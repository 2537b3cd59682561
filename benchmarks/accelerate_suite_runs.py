"""Run a test script of accelerate on ranks of CPUs: SCRIPT."""

from __future__ import annotations

import importlib
import runpy
import sys
from typing import Any

from benchmarks import suites

if __name__ == "__main__":
    suites.install_patches()
    accelerate: Any = importlib.import_module("accelerate")
    accelerate.PartialState(cpu=True)  # the one state of the process; a script that makes it first makes it for GPUs
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
