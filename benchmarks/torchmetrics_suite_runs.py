"""Run the examples in the docstrings of torchmetrics on every rank of a group, and write what each prints: FILE.

Each rank runs all of them, so that each `compute` of a metric synchronizes. The examples of `plot` are left out: they
draw what `compute` returns, and take all but seconds of the time.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import json
import pkgutil
import random
import sys
import types
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import suites

# they download models; what `functional` has, the classes call
LEFT_OUT = (
    *("audio.dnsmos", "audio.nisqa", "functional", "multimodal", "text.bert", "text.infolm", "text.rouge"),
    *("image.arniqa", "image.fid", "image.inception", "image.kid", "image.lpip", "image.mifid", "image.perceptual"),
)


class Recorder(doctest.DocTestRunner):
    """Run examples and keep what each has printed or raised, right or wrong."""

    def __init__(self) -> None:
        super().__init__(verbose=False, optionflags=doctest.ELLIPSIS)
        self.printed: dict[str, list[str]] = {}

    def report_start(self, out: Any, test: Any, example: Any) -> None:
        pass

    def report_success(self, out: Any, test: Any, example: Any, got: str) -> None:
        self.printed[test.name].append(got)

    def report_failure(self, out: Any, test: Any, example: Any, got: str) -> None:
        self.printed[test.name].append(got)

    def report_unexpected_exception(self, out: Any, test: Any, example: Any, exc_info: Any) -> None:
        self.printed[test.name].append(f"{exc_info[0].__name__}: {str(exc_info[1])[:300]}")


def main(path: str) -> None:
    suites.install_patches()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    warnings.simplefilter("ignore")
    recorder = Recorder()
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in _modules():
        for name, item in sorted(vars(module).items()):
            if inspect.isclass(item) and item.__module__ == module.__name__:
                for test in finder.find(item, f"{module.__name__}.{name}", module, extraglobs={}):
                    if test.examples and not test.name.endswith(".plot"):
                        _run(recorder, test)
    with open(f"{path}.{dist.get_rank()}", "w", encoding="utf-8") as file:
        json.dump(recorder.printed, file)
    dist.barrier()
    dist.destroy_process_group()


def _modules() -> Iterator[types.ModuleType]:
    package = importlib.import_module("torchmetrics")
    for info in sorted(pkgutil.walk_packages(package.__path__, "torchmetrics."), key=lambda info: info.name):
        if not info.name.removeprefix("torchmetrics.").startswith(LEFT_OUT):
            with contextlib.suppress(ImportError):  # of a library that this environment lacks, as on every rank
                yield importlib.import_module(info.name)


def _run(recorder: Recorder, test: doctest.DocTest) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    recorder.printed[test.name] = []
    print(test.name, file=sys.stderr, flush=True)
    with contextlib.redirect_stderr(io.StringIO()):
        recorder.run(test, out=lambda text: None)


if __name__ == "__main__":
    main(*sys.argv[1:])
