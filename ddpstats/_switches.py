"""Settings of torch that change the last bits of a result: taken with a step, and set while it is run again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@contextlib.contextmanager
def as_in(environment: Mapping[str, Any]) -> Iterator[None]:
    """Switches that change the last bits; those that the capture does not know stay as they are."""
    before = switches()
    wanted = {name: environment[name] for name in before if type(environment.get(name)) is type(before[name])}
    try:
        _switch({**before, **wanted})
        yield
    finally:
        _switch(before)


def switches() -> dict[str, Any]:
    """As they are now, as plain values by name."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
    }


def _switch(values: Mapping[str, Any]) -> None:
    if 1 <= values["threads"] <= 1024:
        torch.set_num_threads(values["threads"])
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(values["deterministic_algorithms"], warn_only=warn_only)
    torch.backends.cudnn.deterministic = values["cudnn_deterministic"]
    torch.backends.cudnn.benchmark = values["cudnn_benchmark"]
    if values["matmul_precision"] in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(values["matmul_precision"])
    if values["default_dtype"] in _DTYPES:
        torch.set_default_dtype(_DTYPES[values["default_dtype"]])
