"""Compile the reference accelerator with g++ against the installed torch, once for each state of the sources."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
LIMIT_SEC = 900
"""The compiler needs a minute on a quiet core; tests that run beside it take most of ours."""


def missing() -> str | None:
    """Return why the device cannot be built here, or None."""
    if shutil.which("g++") is None:
        return "the reference accelerator needs g++ (apt-get install g++)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the reference accelerator needs Python's headers (apt-get install python3-dev)"
    if torch.__version__.split("+")[0] != "2.13.0":
        return f"the reference accelerator is written for torch 2.13.0, and this is {torch.__version__}"
    return None


@functools.cache
def built() -> Path:
    """Return the compiled module's path. The first process to need it compiles, and others wait for that."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.__file__} {sysconfig.get_config_var('SOABI')}".encode())
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    folder = Path(tempfile.gettempdir(), f"ddpstats-refdev-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; remove it")
    module = folder / digest.hexdigest()[:16] / "refdev_native.so"
    module.parent.mkdir(exist_ok=True)
    with open(module.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists():
            _compile(module)
    return module


def _compile(module: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    flags = ["-std=c++20", "-fPIC", "-O1", "-DTORCH_EXTENSION_NAME=refdev_native"]
    flags += [
        f"-I{folder}" for folder in (include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"])
    ]
    objects = []
    compilers = []
    for source in sorted(SOURCES.glob("*.cpp")):
        target = module.parent / f"{source.stem}.o"
        objects.append(str(target))
        compilers.append(subprocess.Popen(["g++", *flags, "-c", str(source), "-o", str(target)]))
    for compiler in compilers:
        if compiler.wait(LIMIT_SEC) != 0:
            raise RuntimeError("g++ could not compile the reference accelerator; its messages are above")
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    finished = module.with_suffix(".part")
    subprocess.run(["g++", "-shared", *objects, *libraries, "-o", str(finished)], check=True, timeout=LIMIT_SEC)
    finished.rename(module)
