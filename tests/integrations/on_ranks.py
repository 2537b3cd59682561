"""Helpers of the programs on ranks: an argument for each rank, installed integrations, documented lines, one group."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

import ddpstats
from tests.needs import ROOT

Failure = tuple[str, tuple[int, ...], str | None, str]
"""The class, ranks, path and text of an error."""


def of_this_rank(*by_rank: Any) -> Any:
    return by_rank[dist.get_rank()]


@contextlib.contextmanager
def installed(integration: Any, install: bool = True) -> Iterator[None]:
    """Patch the library, or leave it stock; stock it is afterwards, for the rank serves other tests."""
    if install:
        integration.install()
    try:
        yield
    finally:
        integration.uninstall()


def failure_of(call: Callable[..., Any], *args: Any) -> Failure:
    """Return what a call raises as values that can be compared, or the text of what it returns."""
    try:
        return "", (), None, str(call(*args))
    except ddpstats.DdpstatsError as error:
        return type(error).__name__, error.ranks, error.path, str(error)


@contextlib.contextmanager
def on_group(group: Any) -> Iterator[list[str]]:
    """Yield the names of the collectives that are issued on ``group``; `count_collectives` counts all groups'."""
    calls: list[str] = []
    ops = ("allreduce", "allgather", "broadcast", "barrier", "_allgather_base", "all_gather_single")
    originals = {op: getattr(dist.ProcessGroup, op) for op in ops if hasattr(dist.ProcessGroup, op)}
    methods = {op: vars(dist.ProcessGroup)[op] for op in originals}  # not the same objects: those bind no instance

    def watching(op: str, original: Any) -> Any:
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is group:
                calls.append(op)
            return original(self, *args, **kwargs)

        return watched

    try:
        for op, original in originals.items():
            setattr(dist.ProcessGroup, op, watching(op, original))
        yield calls
    finally:
        for op, method in methods.items():
            setattr(dist.ProcessGroup, op, method)


def documented(logger: str) -> str:
    """Return the line of Python that docs/integrations.md has for a logger."""
    page = (ROOT / "docs" / "integrations.md").read_text()
    (line,) = re.findall(rf"^\| {re.escape(logger)} \| `(.+)` \|$", page, re.MULTILINE)
    return str(line)


def write(logger: str, **names: Any) -> None:
    exec(documented(logger), {"re": re, "json": json, **names})


def reset_accelerate() -> None:
    """Forget accelerate's state, which is the process's and of the first Accelerator, or Trainer, that was made."""
    state: Any = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
