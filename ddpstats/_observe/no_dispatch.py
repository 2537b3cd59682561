"""What torch's autograd engine tells of the backward pass that is under way. The only file that asks it.

Checked on torch 2.13. ``queue_callback`` is what DDP and FSDP use themselves; on a torch without it, it is None. On one
without ``torch._C._current_graph_task_id`` no thread is ever seen inside a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

queue_callback: Callable[[Callable[[], None]], None] | None = getattr(
    torch.autograd.Variable._execution_engine, "queue_callback", None
)
"""From inside a backward pass: call something at its end, after what was asked for before."""

graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""The number of the backward pass that this thread is in; -1 outside of any."""


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return graph_task() != -1
