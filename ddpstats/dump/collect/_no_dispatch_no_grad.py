"""A context for what we compute ourselves in the middle of somebody else's program."""

from __future__ import annotations

from typing import Any

import torch


class quietly:
    """Around what we compute ourselves: no graph, no autocast (of cpu and cuda), unseen by modes, the program's too."""

    __slots__ = ("_autocast", "_function", "_grad", "_modes")

    def __enter__(self) -> None:
        self._function = torch._C.DisableTorchFunction()
        self._function.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._autocast: list[str] = []
        if torch._C._is_any_autocast_enabled():
            self._autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        for kind in self._autocast:
            torch.set_autocast_enabled(kind, False)
        self._modes: Any = None
        if torch._C._len_torch_dispatch_stack():
            from torch.utils._python_dispatch import _disable_current_modes

            self._modes = _disable_current_modes()
            self._modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            if self._modes is not None:
                self._modes.__exit__(None, None, None)
        finally:
            for kind in self._autocast:
                torch.set_autocast_enabled(kind, True)
            torch._C._set_grad_enabled(self._grad)
            self._function.__exit__(None, None, None)


def is_out_of_sight() -> bool:
    """Whether a program is made of what runs now: by ``torch.compile``, export or ``torch.jit.trace``."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
