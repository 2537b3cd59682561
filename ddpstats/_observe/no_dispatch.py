"""A context for what we compute ourselves in the middle of somebody else's program."""

from __future__ import annotations

from typing import Any

import torch

from ddpstats._observe.torch_compat import (
    dispatch_mode_count,
    is_jit_tracing,
    without_dispatch_modes,
    without_torch_function,
)


class no_dispatch_no_grad:
    """Around what we compute: it makes no graph, autocast (of cpu and cuda) is off, and nobody's mode sees it."""

    __slots__ = ("_autocast", "_function", "_grad", "_modes")

    def __enter__(self) -> None:
        self._function = without_torch_function()
        self._function.__enter__()
        self._grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        self._autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        for kind in self._autocast:
            torch.set_autocast_enabled(kind, False)
        self._modes: Any = None
        if dispatch_mode_count():
            self._modes = without_dispatch_modes()
            self._modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            if self._modes is not None:
                self._modes.__exit__(None, None, None)
        finally:
            for kind in self._autocast:
                torch.set_autocast_enabled(kind, True)
            torch.set_grad_enabled(self._grad)
            self._function.__exit__(None, None, None)


def is_tracing() -> bool:
    """Whether a program is made of what runs now: by ``torch.compile``, export or ``torch.jit.trace``."""
    return torch.compiler.is_compiling() or is_jit_tracing()
